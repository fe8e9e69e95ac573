"""Metadata of the distributions: complete, equal where it must be, and one version everywhere."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = sorted(path.parent for path in ROOT.glob("p*/*/pyproject.toml"))
NAMES = [path.name for path in PROJECTS]


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def version() -> ModuleType:
    spec = importlib.util.spec_from_file_location("version", ROOT / "scripts" / "version.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["version"] = module
    spec.loader.exec_module(module)
    return module


def test_all_hearts_are_here():
    assert {"core", "serving", "nimble", "orca", "windtunnel", "toolkit", "batchmaker", "dvabatch"} <= set(NAMES)


@pytest.mark.parametrize("folder", PROJECTS, ids=NAMES)
def test_a_distribution_says_what_an_index_shows(folder: Path):
    about = project(folder)
    assert {"description", "readme", "authors", "license", "license-files", "keywords", "classifiers"} <= about.keys()
    assert about["requires-python"] == ">=3.11"
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert not (folder / "LICENSE").is_symlink()  # an sdist could not be unpacked
    pythons = {name.rpartition(" ")[2] for name in about["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert pythons == {"3.11", "3.12", "3.13", "3.14"}


@pytest.mark.parametrize("folder", PROJECTS, ids=NAMES)
def test_a_long_description_stands_alone(folder: Path):
    text = (folder / project(folder)["readme"]).read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if "://" not in link] == []  # an index would show them broken
    assert f"pip install {project(folder)['name']}" in text or 'pip install "mlsys-toolkit[' in text


@pytest.mark.parametrize("folder", [path for path in PROJECTS if path.name != "toolkit"], ids=lambda path: path.name)
def test_a_package_is_typed(folder: Path):
    (package,) = (folder / "src").iterdir()
    assert (package / "py.typed").is_file()
    assert "Typing :: Typed" in project(folder)["classifiers"]


def test_the_meta_package_has_every_subsystem(version: ModuleType):
    extras = project(ROOT / "packages" / "toolkit")["optional-dependencies"]
    members = set(NAMES) - {"core", "serving", "toolkit"}
    assert extras.keys() == members | {"all", "gpu", "otel", "plots"}
    assert {name for group in extras["all"] for name in re.findall(r"[\w-]+", group.partition("[")[2])} == (
        members | {"plots"}
    )


def needs_of(name: str) -> set[str]:
    """Return the names of the packages that one of our distributions brings, by way of our others too."""
    folders = {project(folder)["name"]: folder for folder in PROJECTS}
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for need in project(folders[waiting.pop()])["dependencies"]:
            each = re.match(r"[\w-]+", need)[0]  # type: ignore[index]
            if each not in found:
                found.add(each)
                waiting += [each] if each in folders else []
    return found


@pytest.mark.parametrize("name", ["mlsys-core", "mlsys-nimble"])
def test_a_library_brings_no_web_server_and_no_plots(name: str):
    assert {"torch", "typer"} <= needs_of(name)
    servers = {"fastapi", "starlette", "uvicorn", "uvloop", "httptools", "grpcio", "prometheus-client", "structlog"}
    assert needs_of(name).isdisjoint(servers | {"pydantic", "httpx", "httpx-sse", "matplotlib", "mlsys-serving"})


def test_there_is_one_version_and_one_range(version: ModuleType):
    (stated,) = set(version.versions(ROOT).values())
    assert len(version.versions(ROOT)) == len(PROJECTS) + 1  # the benchmarks too
    for folder in PROJECTS:
        about = project(folder)
        extras = about.get("optional-dependencies", {}).values()
        needs = [*about["dependencies"], *(need for extra in extras for need in extra)]
        ranges = {
            need.partition(">=")[1] + need.partition(">=")[2]
            for need in needs
            if need.startswith("mlsys-") and ">" in need
        }
        assert ranges <= {version.needed(stated)}


def test_a_version_is_set_everywhere(version: ModuleType, tmp_path: Path):
    for path in [
        *version.holders(ROOT),
        *(folder / "pyproject.toml" for folder in PROJECTS),
        ROOT / "benchmarks" / "pyproject.toml",
    ]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    version.set_version(tmp_path, "0.7.2")
    assert set(version.versions(tmp_path).values()) == {"0.7.2"}
    about = project(tmp_path / "packages" / "orca")
    assert "mlsys-core>=0.7,<0.8" in about["dependencies"]
    assert "torch>=2.11" in about["dependencies"]
    assert 'target-version = "py311"' in (ROOT / "pyproject.toml").read_text()
