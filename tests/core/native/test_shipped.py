"""Libraries that come in a wheel: taken where sources, options and processor fit, without a compiler or a cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlsys_core import config
from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import INCLUDE, Kernel, executable_levels, load_kernel, loader, store
from mlsys_core.native.compiler import find_compiler
from mlsys_core.native.levels import Level, levels_of, recipe, this_machine

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'
pytestmark = pytest.mark.skipif(not executable_levels(), reason="this processor's family has no levels")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing configured but an empty cache."""
    for name in ("CXX", "MLSYS_KERNEL_LEVEL", "MLSYS_SANITIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "_failures", {})
    store.warn_once.cache_clear()
    config.settings.cache_clear()
    yield
    config.settings.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "package" / "kernel.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


FLAGS = ("-DANSWER=1",)  # the promise of the library's name; what is inside says which library was loaded


def ship(source: Path, level: Level, answer: int, *, flags: tuple[str, ...] = FLAGS) -> Path:
    """Put a library for ``level`` beside ``source`` that answers ``answer``."""
    wanted = recipe(source, level, flags=flags)
    wanted.shipped.parent.mkdir(exist_ok=True)
    options = [*wanted.options, "-UANSWER", f"-DANSWER={answer}", f"-I{INCLUDE}"]
    find_compiler().compile(source, wanted.shipped, options)
    return wanted.shipped


def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: str = "native") -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("MLSYS_KERNEL_LEVEL", level)
    config.settings.cache_clear()


def test_the_highest_level_of_the_processor_serves(source: Path, tmp_path: Path, monkeypatch):
    levels = executable_levels()
    for number, level in enumerate(levels):
        ship(source, level, 100 + number)
    without_compiler(monkeypatch, tmp_path)
    assert Kernel(source, flags=FLAGS).load().answer() == 100 + len(levels) - 1
    assert not (tmp_path / "cache").exists()


def test_a_chosen_level_is_loaded_and_no_other(source: Path, tmp_path: Path, monkeypatch):
    lowest, *others = executable_levels()
    ship(source, lowest, 7)
    without_compiler(monkeypatch, tmp_path, lowest.name)
    assert Kernel(source, flags=FLAGS).load().answer() == 7
    if others:
        without_compiler(monkeypatch, tmp_path, others[-1].name)
        with pytest.raises(KernelUnavailableError, match=r"no C\+\+ compiler"):
            Kernel(source, flags=FLAGS).load()


@pytest.mark.parametrize("change", ["source", "header", "flags"])
def test_a_library_of_other_sources_or_flags_is_not_loaded(change: str, source: Path, tmp_path: Path):
    header = source.with_name("kernel.h")
    header.write_text("")
    kernel = Kernel(source, headers=(header,), flags=FLAGS)
    wanted = recipe(source, executable_levels()[-1], flags=FLAGS, headers=(header,))
    wanted.shipped.parent.mkdir()
    find_compiler().compile(source, wanted.shipped, [*wanted.options, "-UANSWER", "-DANSWER=9"])
    assert kernel.load().answer() == 9
    match change:
        case "source":
            source.write_text(SOURCE + "// changed\n")
        case "header":
            header.write_text("// changed\n")
        case "flags":
            assert kernel.load(("-DOTHER",)).answer() == 1
            return
    assert kernel.load().answer() == 1  # compiled from what is there


def test_a_library_that_cannot_be_loaded_costs_one_line(source: Path, caplog: pytest.LogCaptureFixture):
    shipped = ship(source, executable_levels()[-1], 5)
    shipped.write_bytes(shipped.read_bytes()[:200])
    assert Kernel(source, flags=FLAGS).load().answer() == 1
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(shipped) in line


def test_a_recipe_for_another_machine_has_another_key(source: Path):
    (arm,) = levels_of("aarch64")
    keys = {recipe(source, arm, machine=f"Linux {family}").key for family in ("aarch64", "riscv64")}
    assert len(keys) == 2
    level = executable_levels()[0]
    assert recipe(source, level, machine=this_machine()) == recipe(source, level)


def test_compiling_says_so_where_nobody_set_logging_up(source: Path, tmp_path: Path):
    script = (
        "import sys, logging; from pathlib import Path; from mlsys_core.native import load_kernel\n"
        "if len(sys.argv) > 3: logging.basicConfig(level=logging.WARNING)\n"
        "for _ in range(2): load_kernel(Path(sys.argv[1]), cache_dir=Path(sys.argv[2]), flags=('-DANSWER=1',))"
    )
    for name, says in ((), "mlsys: compiling kernel.cpp for this processor (once, about 3 s)\n"), (("set",), ""):
        command = [sys.executable, "-c", script, str(source), str(tmp_path / f"cache{len(name)}"), *name]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert result.stderr == says


def test_load_kernel_takes_it_too(source: Path, tmp_path: Path):
    ship(source, executable_levels()[-1], 11)
    assert load_kernel(source, cache_dir=tmp_path, flags=FLAGS).answer() == 11
