"""Every kernel compiles for every level, whether or not this machine executes it; levels are named and checked."""

from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from mlsys_core import config
from mlsys_core.errors import InvalidInputError
from mlsys_core.native import FLAGS, INCLUDE, LEVELS, builds, executable_levels
from mlsys_core.native.levels import level_named

ROOT = Path(__file__).parents[3]
SOURCES = sorted(path for folder in ("packages", "plugins") for path in (ROOT / folder).glob("*/src/**/*.cpp"))
WITH_TILES = [
    source for source in SOURCES if any("_tile_loadconfig" in each.read_text() for each in source.parent.glob("*.h"))
]
WIDE = "x86-64-v3, 16 lanes"  # vectors that no register of the level holds
BUILDS = {**{level.name: level.flags for level in LEVELS}, WIDE: ("-march=x86-64-v3", "-DMLSYS_LANES=16")}
COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]


def test_all_sources_are_found():
    assert [source.name for source in WITH_TILES] == ["program.cpp"]
    assert {path.name for path in SOURCES} >= {
        *("kernels.cpp", "kernels_bf16.cpp", "executor.cpp", "training.cpp", "program.cpp"),
        *("models.cpp", "soft_trees.cpp", "steps.cpp", "scheduler.cpp", "plan.cpp", "encoder.cpp"),
    }


@pytest.mark.slow
@pytest.mark.skipif(not LEVELS, reason="this processor's family has no levels")
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_source_compiles_for_every_level(compiler: str, name: str):
    """To assembly, since impossible operands of an ``asm`` are found only there; unoptimised, to be quick.

    Of wide vectors one source shows that ``in_register`` has operands; of the others types are checked. Levels that
    this machine executes are compiled, and run, by the kernels' own tests. For AMX, sources beside which no header has
    tiles are what they are for the level below.
    """
    if name in {level.name for level in executable_levels()} and compiler == COMPILERS[0]:
        pytest.skip("the kernels' own tests compile and run it")
    failed = {}
    for source in WITH_TILES if name == "amx" else SOURCES:
        ends = ["-fsyntax-only"] if name == WIDE and source.name != "encoder.cpp" else ["-S", "-o", "/dev/null"]
        options = [*FLAGS, "-O0", *BUILDS[name], "-Wno-psabi", f"-I{INCLUDE}", *ends]
        result = subprocess.run([compiler, *options, str(source)], capture_output=True, text=True, check=False)
        if result.returncode:
            failed[source.name] = [line for line in result.stderr.splitlines() if "error" in line][:3]
    assert not failed


@pytest.mark.skipif(not LEVELS, reason="this processor's family has no levels")
def test_each_level_has_what_the_one_below_it_has():
    for lower, higher in pairwise(LEVELS):
        assert lower.needs < higher.needs
        assert executable_levels(has=higher.needs) == LEVELS[: LEVELS.index(higher) + 1]
        assert higher not in executable_levels(has=lower.needs)
        assert level_named(higher.name, has=higher.needs) is higher


@pytest.mark.skipif(not LEVELS, reason="this processor's family has no levels")
def test_a_level_that_cannot_be_had_is_refused():
    with pytest.raises(InvalidInputError, match=r"lacks .*avx512f.*highest that it executes is x86-64-v3"):
        level_named("x86-64-v4", has=LEVELS[1].needs)
    with pytest.raises(InvalidInputError, match="MLSYS_KERNEL_LEVEL is 'avx9'; it may be native, x86-64"):
        level_named("avx9")


@pytest.mark.skipif(not LEVELS, reason="this processor's family has no levels")
def test_builds_are_the_levels_up_to_the_chosen_one():
    names = [level.name for level in executable_levels()]
    found = builds()
    assert found["native"] == ()
    assert [name for name in found if name not in ("native", "wide")] == names[:-1]
    assert ("wide" in found) == ("x86-64-v4" not in names)
    assert list(builds("x86-64")) == ["x86-64", "wide"]


def test_settings_name_level_sanitizer_and_compiler():
    environ = {"MLSYS_KERNEL_LEVEL": "x86-64-v3", "MLSYS_SANITIZE": "thread", "CXX": "clang++"}
    found = config.read_settings(environ)
    assert (found.kernel_level, found.sanitizer, found.compiler) == ("x86-64-v3", "thread", "clang++")
    unset = config.read_settings({})
    assert (unset.kernel_level, unset.sanitizer, unset.compiler) == ("native", None, None)
