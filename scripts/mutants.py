"""Run mutmut over the pure modules (schedulers, planners, passes, policies, codecs) and print the share that is killed.

Each area is copied into a workspace of its own below ``build/mutants``: its package's sources, and the tests that
must notice. mutmut changes one expression at a time and runs those tests that reach it. A mutant that no test kills is
listed; docs/testing.md says why some are left (equivalent code, messages).

Usage: python scripts/mutants.py [AREA ...] [--digits 37]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mlsys_core.native.levels import LEVELS

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
_LEFT = {0: "survived", 33: "no test reaches it"}  # mutmut's exit codes of mutants that were not killed


@dataclass(frozen=True)
class Area:
    """Modules that are changed, and the tests that are to notice."""

    source: str  # the package's directory
    modules: tuple[str, ...]  # patterns below it
    tests: tuple[str, ...]  # files or folders, from the root
    also: tuple[str, ...] = ()  # files that the tests import or read
    skip: str = ""  # words in the names of tests that take too long to be run for each mutant


def _paths(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names.split())


CORE, SERVING, NIMBLE, ORCA = (f"packages/{name}/src/mlsys_{name}" for name in ("core", "serving", "nimble", "orca"))
WINDTUNNEL = "packages/windtunnel/src/mlsys_windtunnel"
BATCHMAKER, DVABATCH = (f"plugins/{name}/src/mlsys_{name}" for name in ("batchmaker", "dvabatch"))
AREAS = {
    "core-memory": Area(
        CORE,
        _paths("memory", "placement plan block_pool run_pool"),
        ("tests/core/memory", "tests/property/memory"),
        ("benchmarks/src/mlsys_bench/core/memory_plan.py",),
    ),
    "core-serving": Area(
        CORE,
        _paths("loop", "queue baselines simulated"),
        (
            *_paths("tests/core/loop", "test_queue test_baselines test_baseline_rules test_simulated"),
            "tests/property/serving",
        ),
    ),
    "core-loop": Area(
        CORE,
        _paths("loop", "inbox serving_loop dispatch"),
        _paths("tests/core/loop", "test_loop test_loop_threads test_executors"),
        ("tests/processes.py",),
    ),
    "core-plugins": Area(
        CORE,
        _paths("plugins", "loader loading registry"),
        (*_paths("tests/core/plugins", "test_loader test_loading"), "tests/integration/test_plugin_failures.py"),
    ),
    "isolation": Area(
        SERVING,
        ("isolation/*.py",),
        ("tests/serving/test_isolation.py", "tests/oracles/isolation/test_programs.py"),
        ("tests/oracles/isolation/programs.py",),
    ),
    "orca-schedulers": Area(
        ORCA,
        _paths("scheduling", "request_pool chunked orca paged pager policy batch request_level"),
        _paths(
            "tests/orca",
            "test_scheduler test_scheduler_book test_scheduler_chunked test_scheduler_encoder test_scheduler_faults"
            " test_scheduler_figures test_scheduler_paged test_scheduler_request_level test_policy_names",
        ),
        ("tests/orca/test_policies.py",),
    ),
    "orca-answers": Area(
        ORCA,
        (
            "text/tokenizer.py",
            *_paths("api", "text_stream conversation tool_parser tagged_calls"),
        ),
        (
            *_paths("tests/orca", "test_tokenizer test_tools test_reasoning test_stop_strings"),
            "tests/oracles/orca_detokenizer/test_detokenizer.py",
        ),
        (*_paths("tests/orca", "conftest"), "tests/oracles/orca_detokenizer/sequences.py"),
    ),
    "orca-configs": Area(
        ORCA,
        _paths("model", "config_readers rope limits"),
        (
            *_paths("tests/orca/models", "test_gguf_keys test_config test_rope"),
            "tests/conformance/orca/test_gguf_configs.py",
        ),
        (
            "tests/orca/conftest.py",
            "tests/installed.py",
            *_paths("tests/conformance/orca", "conftest families to_gguf"),
        ),
    ),
    "nimble-planning": Area(
        NIMBLE,
        (
            "planning/streams.py",
            "planning/storage.py",
            "planning/schedule.py",
            "ir/strides.py",
            "ir/graph.py",
        ),
        _paths("tests/nimble", "test_streams test_storage test_strides test_graph test_schedule"),
        ("tests/graph_checks.py",),
    ),
    "nimble-passes": Area(NIMBLE, ("passes/*.py",), ("tests/nimble/passes", "tests/nimble/capture/test_quantised.py")),
    "batchmaker-scheduling": Area(
        BATCHMAKER,
        _paths("scheduling", "admission batching requests results completion tables tasks"),
        ("plugins/batchmaker/tests/scheduling",),
        ("plugins/batchmaker/tests/conftest.py",),
    ),
    "dvabatch-policies": Area(
        DVABATCH,
        ("scheduling/policies/*.py", "scheduling/table.py", "scheduling/scheduler.py", "scheduling/costs.py"),
        _paths(
            "plugins/dvabatch/tests",
            "test_table test_policy_state test_policy_rules test_load_rules test_planner_rules test_scheduler_rules "
            "test_policies test_planner test_scheduler",
        ),
    ),
    "codecs": Area(
        "plugins/open-inference/src/mlsys_open_inference",
        _paths(".", "rest/codec grpc/codec tensors"),
        _paths("plugins/open-inference/tests", "test_rest_codec test_grpc_codec test_tensors"),
        ("plugins/open-inference/tests/answers.py",),
    ),
    "converters": Area(
        WINDTUNNEL,
        _paths("convert", "linear scale svm decompose discriminant trees_sklearn trees_ensembles"),
        (
            *_paths(
                "tests/windtunnel/converters",
                "test_linear test_scale test_svm test_decompose test_discriminant test_naive_bayes test_trees_sklearn "
                "test_trees_ensembles",
            ),
            "tests/oracles/windtunnel_estimators/test_oracle.py",
        ),
        (
            *_paths("tests/windtunnel", "conftest converters/conftest"),
            *_paths("tests/oracles/windtunnel_estimators", "compare compose estimators facade inputs sources"),
        ),
        skip="exported or loaded",
    ),
}


def main() -> int:
    """Run the areas named, or all, and return 1 where fewer than nine tenths are killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("area", nargs="*", help=f"of {', '.join(AREAS)}; all of them by default")
    parser.add_argument(
        "--digits", default="", help="try only mutants whose number ends in one of these: 37 is a fifth"
    )
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="mutants tried at once")
    given = parser.parse_args()
    if unknown := set(given.area) - set(AREAS):
        parser.error(f"there is no area {sorted(unknown)[0]!r}; there are {', '.join(AREAS)}")
    if lost := missing():
        parser.error(f"areas name files that are not there (moved?): {', '.join(lost)}")
    total = killed = 0
    lines = []
    for name in given.area or AREAS:
        start = time.monotonic()
        codes = run(name, AREAS[name], given.children, given.digits)
        survivors = sorted(f"{mutant} {_LEFT[code]}" for mutant, code in codes.items() if code in _LEFT)
        tried, dead = len(codes), len(codes) - len(survivors)
        total, killed = total + tried, killed + dead
        lines.append(f"{name}: {dead} of {tried} killed ({dead / max(tried, 1):.1%}), {time.monotonic() - start:.0f} s")
        (WORK / f"{name}-survivors.txt").write_text("\n".join(survivors) + "\n")
        print(lines[-1], flush=True)
    print("\n".join(["", *lines, f"mutants: {killed} of {total} killed ({killed / max(total, 1):.1%}), goal 90 %"]))
    print(f"survivors: {WORK}/AREA-survivors.txt; see one with: cd {WORK}/AREA && mutmut show NAME")
    return int(killed < 0.9 * total)


def missing() -> list[str]:
    """Return the patterns of all areas that match no file: no module would be changed, or no test would run."""
    patterns = [
        pattern
        for area in AREAS.values()
        for pattern in (*(f"{area.source}/{module}" for module in area.modules), *area.tests, *area.also)
    ]
    return sorted({pattern for pattern in patterns if not any(ROOT.glob(pattern))})


def run(name: str, area: Area, children: int, digits: str = "") -> dict[str, int]:
    """Try the mutants of one area, and return mutmut's exit code for each."""
    work = WORK / name
    shutil.rmtree(work, ignore_errors=True)
    package = Path(area.source).name
    shutil.copytree(ROOT / area.source, work / "src" / package, ignore=shutil.ignore_patterns("__pycache__"))
    tests = [path for pattern in area.tests for path in sorted(ROOT.glob(pattern))]
    for path in [*tests, *(ROOT / each for each in area.also), ROOT / "conftest.py"]:
        to = work / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, to)
    (work / "pyproject.toml").write_text(_config(package, area, [str(path.relative_to(ROOT)) for path in tests]))
    # One level of kernels is enough: it is Python that is changed.
    level = next((each.name for each in LEVELS), "native")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MLSYS_KERNEL_LEVEL": level}
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children)]
    if digits:
        command.append(f"*__mutmut_*[{digits}]")
    log = WORK / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run(command, cwd=work, env=environment, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").replace("\r", "\n").splitlines()[-30:])
        raise SystemExit(f"mutmut failed on {name}:\n{tail}")
    codes: dict[str, int | None] = {}
    for path in (work / "mutants").rglob("*.meta"):
        codes |= json.loads(path.read_text())["exit_code_by_key"]
    return {mutant: code for mutant, code in codes.items() if code is not None}


def _config(package: str, area: Area, tests: list[str]) -> str:
    """Return mutmut's and pytest's settings for one workspace."""
    copied = sorted({Path(path).parts[0] for path in [*tests, *area.also]} | {"conftest.py"})
    only = [f"src/{package}/{pattern}" for pattern in area.modules]
    options = [f"-k=not ({area.skip})"] if area.skip else []
    options += ["--import-mode=importlib", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "-q"]
    return "\n".join(
        [
            "[tool.mutmut]",
            'source_paths = ["src"]',
            f"only_mutate = {json.dumps(only)}",
            f"also_copy = {json.dumps(copied)}",
            f"pytest_add_cli_args_test_selection = {json.dumps(tests)}",
            f"pytest_add_cli_args = {json.dumps(options)}",
            "mutate_only_covered_lines = false",
            "use_git_change_detection = false",
            "track_dependencies = false",
            "[tool.pytest.ini_options]",
            'asyncio_mode = "auto"',
            'markers = ["gpu: x", "browser: x", "slow: x", "model: x"]',
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
