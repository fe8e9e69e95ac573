"""Run the kernels' own tests with kernels built by the address, undefined-behaviour and thread sanitisers.

``make sanitize`` runs it. Each subsystem's tests run in a process of their own for each sanitiser; the last lines are
the tally. A report counts when one of its frames lies in a kernel of ours: Python and torch are not instrumented, and
their leaks are not ours. First a kernel with planted faults must be reported, or the tally means nothing.
Exits with 1 when a report counts, a test fails, or a process dies.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "packages/core/src/mlsys_core/include"
TRAINING = [f"tests/nimble/training/test_{name}.py" for name in ("kernels", "linear", "attention", "convolutions")]
SUITES = {  # by subsystem: the tests that call its kernels directly
    "batchmaker": [
        "plugins/batchmaker/tests/native",
        *(f"plugins/batchmaker/tests/{name}/test_compiled.py" for name in ("plan", "scheduling")),
    ],
    "encoders": ["plugins/encoders/tests/test_compiled_layers.py"],
    "windtunnel": [
        "tests/windtunnel/modules",
        "tests/windtunnel/soft/test_soft_trees.py::test_the_kernel_computes_as_torch_does_and_so_do_its_gradients",
    ],
    "orca": ["tests/orca/native"],
    "nimble": ["tests/nimble/native"],
    "nimble-training": TRAINING,
}
CHECKS = (  # programs: subsystem, source, folder of its headers
    ("nimble-replay", "tests/nimble/native/replay_check.cpp", ROOT / "packages/nimble/src/mlsys_nimble/backends/cpu"),
    ("core-threads", "tests/core/native/thread_pool_check.cpp", CORE),
)
BUILDS = ("address,undefined", "thread")  # of each kernel; the first two sanitisers go together
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}  # preloaded; the others come with the kernels
OPTIONS = {  # by variable
    # GCC before 13 puts vectors on misaligned fake stacks (its bug 110027), so use after return is not looked for.
    "ASAN_OPTIONS": "detect_leaks=1:exitcode=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=0:ignore_noninstrumented_modules=1:history_size=4",
}
START = "|".join(  # of a report, of any sanitiser
    (
        r"==\d+==ERROR: AddressSanitizer|(?:Direct|Indirect) leak of",
        r"^\S+:\d+:\d+: runtime error:",
        r"WARNING: ThreadSanitizer",
    )
)
PLANTED = {  # by build: functions of scripts/planted_faults.cpp, and what the report of each must say
    "address,undefined": {
        "address_0": "heap-buffer-overflow",
        "address_1": "leak of 4000 byte",
        "undefined_0": "signed integer overflow",
        "undefined_1": "outside the range of representable values",
    },
    "thread": {"thread_0": "data race"},
}
CALL_PLANTED = """
import sys
from pathlib import Path
from mlsys_core.config import settings
from mlsys_core.native import load_kernel
getattr(load_kernel(Path(sys.argv[1]), cache_dir=settings().cache_dir), sys.argv[2])()
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Findings of one process."""

    build: str
    subsystem: str
    num_passed: int
    num_skipped: int
    failed: tuple[str, ...]  # names of tests; or why there are none
    reports: tuple[str, ...]  # that count, each once
    seconds: float


def main() -> None:
    """Run the tests that the command line asks for, print the tally, and exit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", choices=BUILDS, action="append", help="only this one; may be repeated")
    parser.add_argument("--subsystem", choices=list(SUITES), action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    args = parser.parse_args()
    builds, subsystems = args.build or BUILDS, args.subsystem or list(SUITES)
    began = time.monotonic()
    for build in builds:
        require_planted_faults(build)
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = list(pool.map(lambda pair: run(*pair), [(build, name) for name in subsystems for build in builds]))
    if "thread" in builds and "nimble" in subsystems:
        outcomes += [run_check(*check) for check in CHECKS]
    for outcome in outcomes:
        for text in (*outcome.failed, *outcome.reports):
            print(f"\n== {outcome.build}, {outcome.subsystem}\n{text}")
    print()
    for outcome in outcomes:
        print(tally(outcome))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = used.ru_utime + used.ru_stime
    num_reports = sum(len(each.reports) for each in outcomes)
    print(f"sanitize: {num_reports} reports, {time.monotonic() - began:.0f} s, {processor_s:.0f} s of processor time")
    sys.exit(any(outcome.failed or outcome.reports for outcome in outcomes))


def run(build: str, subsystem: str) -> Outcome:
    """Run one subsystem's tests with one build."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log, results = Path(folder) / "log", Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--timeout=3000", "-p", "no:cacheprovider"]
        # Beside the address sanitiser the undefined-behaviour one writes to the process's standard error.
        command += ["--capture=sys", f"--junitxml={results}", *SUITES[subsystem]]
        if build == "thread":  # its shadow memory wants addresses that are not random
            command = ["setarch", "-R", *command]
        finished = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(build, log),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        text = "\n".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("log*")))
        reports = reports_of(f"{text}\n{finished.stderr}")
        if not results.exists():
            last = "\n".join((finished.stdout + finished.stderr).splitlines()[-15:])
            failed: tuple[str, ...] = (f"the process ended with {finished.returncode} and no results:\n{last}",)
            return Outcome(build, subsystem, 0, 0, failed, reports, time.monotonic() - began)
        cases = list(ET.parse(results).getroot().iter("testcase"))
    failed = tuple(
        f"{case.get('classname')}::{case.get('name')}\n{(found.text or '')[-1500:]}"
        for case in cases
        for found in case
        if found.tag in ("failure", "error")
    )
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - len(failed)
    print(f"{build}, {subsystem}: done in {time.monotonic() - began:.0f} s", flush=True)
    return Outcome(build, subsystem, passed, skipped, failed, reports, time.monotonic() - began)


def require_planted_faults(build: str) -> None:
    """Exit unless the build reports each fault that its sanitisers are there for."""
    for function, fault in PLANTED[build].items():
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            source = ROOT / "scripts" / "planted_faults.cpp"
            command = ["setarch", "-R", sys.executable, "-c", CALL_PLANTED, str(source), function]
            finished = subprocess.run(command, env=environment(build, log), capture_output=True, text=True, check=False)
            text = "\n".join(path.read_text(errors="replace") for path in Path(folder).iterdir())
        text += finished.stderr
        if not any(fault in report for report in reports_of(text)):
            sys.exit(f"the {build} build does not report a planted fault ({fault}):\n{text[-3000:]}")


def environment(build: str, log: Path) -> dict[str, str]:
    """Return the variables that build kernels with sanitisers, preload their runtimes, and write reports to ``log``."""
    found = {**os.environ, "MLSYS_SANITIZE": build, "OMP_NUM_THREADS": "1"}
    if "address" in build:  # or what only Python's own pools point to would count as lost
        found["PYTHONMALLOC"] = "malloc"
    found |= {name: f"{options}:log_path={log}" for name, options in OPTIONS.items()}
    compiler = os.environ.get("CXX", "c++")
    # The C++ runtime too: a sanitiser looks for the throw that it replaces as it starts.
    names = [RUNTIMES[name] for name in build.split(",") if name in RUNTIMES] + ["libstdc++.so"]
    found["LD_PRELOAD"] = " ".join(library_of(compiler, name) for name in names)
    return found


def library_of(compiler: str, name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    said = subprocess.run([*compiler.split(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return os.path.realpath(said.stdout.strip())


def reports_of(text: str) -> tuple[str, ...]:
    r"""Return the reports in ``text`` with a frame in a kernel, each location once.

    Example:
        >>> reports_of("/packages/rows.h:7:9: runtime error: shift\n    #0 0x1 in f /packages/rows.h:7\n")
        ('/packages/rows.h:7:9: runtime error: shift\n    #0 0x1 in f /packages/rows.h:7',)
    """
    found: dict[str, str] = {}
    for report in re.split(f"(?m)^(?={START})|(?={START})", text):
        if not re.search(START, report, re.MULTILINE) or not is_ours(report):
            continue
        frames = re.findall(r"#\d+ 0x[0-9a-f]+ in (.*)", report)
        ours = [frame for frame in frames if is_ours(frame)]
        found.setdefault(ours[0] if ours else report.splitlines()[0], "\n".join(report.rstrip().splitlines()[:60]))
    return tuple(found.values())


def is_ours(text: str) -> bool:
    """Return whether a report or a frame names native code of this repository, or a library built from it."""
    return bool(re.search(r"/(?:packages|plugins|scripts)/\S+\.(?:h|cpp)\b|-[0-9a-f]{16}-[0-9a-f]{8}\.so", text))


def run_check(subsystem: str, source: str, include: Path) -> Outcome:
    """Build a program of its own that checks native threads, and run it under the thread sanitiser."""
    began = time.monotonic()
    program = ROOT / "build" / Path(source).stem
    program.parent.mkdir(exist_ok=True)
    command = [*os.environ.get("CXX", "c++").split(), "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    command += [f"-I{include}", f"-I{CORE}", str(ROOT / source), "-o", str(program)]
    failed = []
    for step in (command, ["setarch", "-R", str(program)]):
        finished = subprocess.run(step, capture_output=True, text=True, check=False)
        if finished.returncode:
            failed = [f"{step[0]} ended with {finished.returncode}:\n{(finished.stdout + finished.stderr)[-3000:]}"]
            break
    return Outcome("thread", subsystem, int(not failed), 0, tuple(failed), (), time.monotonic() - began)


def tally(outcome: Outcome) -> str:
    """Return the outcome as one line."""
    counts = f"{outcome.num_passed:5,} passed, {outcome.num_skipped} skipped, {len(outcome.failed)} failed"
    found = f"{counts}, {len(outcome.reports)} reports, {outcome.seconds:.0f} s"
    return f"sanitize {outcome.build:17} {outcome.subsystem:15} {found}"


if __name__ == "__main__":
    main()
