"""Wheels with libraries inside: their tags, their records, and the options that Zig takes."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from mlsys_core.native.levels import levels_of
from wheel.wheelfile import WheelError, WheelFile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "scripts" / "wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wheels"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain" / "thing-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with WheelFile(path, "w") as wheel:
        wheel.writestr("thing/__init__.py", "")
        wheel.writestr(
            "thing-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.4\nName: thing\nVersion: 1.0\n")
    return path


def test_a_wheel_gets_its_libraries_and_its_tag(wheels: ModuleType, plain: Path, tmp_path: Path):
    library = tmp_path / "any.so"
    library.write_bytes(b"code")
    made = wheels.add_libraries(plain, tmp_path, wheels.Platform("aarch64"), {"thing/_built/any.so": library})
    assert made.name == "thing-1.0-py3-none-manylinux_2_28_aarch64.whl"
    with WheelFile(made) as wheel:  # reading checks each file against the record
        assert {name: wheel.read(name) for name in wheel.namelist()}["thing/_built/any.so"] == b"code"
        about = wheel.read("thing-1.0.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in about
    assert "Tag: py3-none-manylinux_2_28_aarch64" in about
    assert "any" not in about.split("Tag: ")[1].split("-")


def test_a_changed_library_does_not_match_the_record(wheels: ModuleType, plain: Path, tmp_path: Path):
    library = tmp_path / "any.so"
    library.write_bytes(b"code")
    made = wheels.add_libraries(plain, tmp_path, wheels.Platform("x86_64"), {"thing/any.so": library})
    changed = plain.parent / made.name
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"evil" if name == "thing/any.so" else old.read(name))
    with WheelFile(changed) as wheel, pytest.raises(WheelError, match="Hash mismatch"):
        wheel.read("thing/any.so")


def test_zig_takes_every_level(wheels: ModuleType):
    for family in ("x86_64", "aarch64"):
        for level in levels_of(family):
            *others, cpu = wheels.options_for_zig(["-O3", *level.flags])
            assert others == ["-O3"]
            assert cpu.startswith("-mcpu=")
    assert wheels.options_for_zig(levels_of("x86_64")[-1].flags) == [
        "-mcpu=x86_64_v4+avx512bf16+avx512vnni+amx_tile+amx_bf16+amx_int8"
    ]


def test_only_levels_that_torch_is_quick_at_are_shipped(wheels: ModuleType):
    assert [level.name for level in wheels.Platform("x86_64").levels] == [
        "x86-64-v3",
        "x86-64-v4",
        "avx512-bf16",
        "amx",
    ]
    assert [level.name for level in wheels.Platform("aarch64").levels] == ["armv8-a"]


def test_every_distribution_is_built(wheels: ModuleType):
    own = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("p*/*/pyproject.toml")}
    assert set(wheels.DISTRIBUTIONS) == own
