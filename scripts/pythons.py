"""Check the other Pythons that this machine has: every source compiles, and what needs no torch passes its tests.

Run by ``make pythons`` and by CI. The versions are those that core's classifiers name, but for the one that runs this;
interpreters are looked for on PATH, in pyenv's folder and with uv. Each gets an environment under ``.venv-pythons``
with the locked packages that these tests need; torch would take a minute more each, so ``make release-check`` runs the
rest. An interpreter that is not there, or whose packages cannot be had, is named and fails nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("packages", "plugins", "benchmarks", "scripts", "tests", "examples", "conftest.py")
LOCK = ROOT / "requirements" / "dev.lock"
PACKAGES = (  # what the tests below import; the lock says which versions
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "archspec", "fastapi", "httptools"),
    *(
        "httpx",
        "httpx-sse",
        "jinja2",
        "jiter",
        "ml-dtypes",
        "networkx",
        "numpy",
        "packaging",
        "platformdirs",
        "pluggy",
        "psutil",
    ),
    *("prometheus-client", "pydantic", "rich", "structlog", "threadpoolctl", "typer", "uvicorn", "uvloop"),
)
TESTS = (
    *("tests/core/memory/test_plan.py", "tests/core/memory/test_pools.py"),
    *(
        "tests/core/plugins/test_loader.py",
        "tests/core/profiling/test_recorder.py",
        "tests/core/profiling/test_processes.py",
    ),
    *(
        "tests/core/loop/test_loop.py",
        "tests/core/loop/test_queue.py",
        "tests/core/loop/test_baseline_rules.py",
    ),
    *("tests/serving/http/test_errors.py", "tests/serving/http/test_gate.py"),
    *("tests/serving/http/test_streaming.py", "tests/serving/http/test_tls.py"),
    *(
        "tests/benchmarks/workload/test_parse.py",
        "tests/benchmarks/workload/test_trace.py",
        "tests/benchmarks/workload/test_http_target.py",
    ),
    *("tests/nimble/test_graph.py", "tests/nimble/test_streams.py", "tests/nimble/test_planner.py"),
    *("tests/property/orca", "tests/property/serving", "plugins/batchmaker/tests/scheduling"),
    *("plugins/dvabatch/tests/test_planner_rules.py", "plugins/dvabatch/tests/test_scheduler_rules.py"),
)
ASK = "import sys; print(*sys.version_info[:3], sys.version_info.releaselevel, sep='.')"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter that answered."""

    path: Path
    version: str  # "3.13.0"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One interpreter's check, in a line."""

    line: str
    has_failed: bool
    output: str = ""  # of what failed


def versions() -> list[str]:
    """Return the versions that core's classifiers name ("3.12"), without the one that runs this."""
    project = tomllib.loads((ROOT / "packages" / "core" / "pyproject.toml").read_text())["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if each.startswith("Programming Language")]
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [each for each in named if each.count(".") == 1 and each != own]


def said(*command: str | Path) -> str:
    """Return what a command prints, or nothing where it is not there or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def candidates(version: str) -> Iterator[Path]:
    """Yield paths at which an interpreter of ``version`` may be, the likeliest first."""
    if on_path := shutil.which(f"python{version}"):
        yield Path(on_path)
    root = os.environ.get("PYENV_ROOT") or said("pyenv", "root")
    if root:
        yield from sorted(Path(root, "versions").glob(f"{version}.*/bin/python{version}"), reverse=True)
    if by_uv := said("uv", "python", "find", "--no-python-downloads", version):
        yield Path(by_uv)


def find(version: str) -> Interpreter | None:
    """Return the first interpreter that answers as ``version``, or None."""
    for path in candidates(version):
        numbers, _, level = said(path, "-c", ASK).rpartition(".")
        if numbers.startswith(f"{version}.") and level == "final":  # a shim of pyenv may be there and answer nothing
            return Interpreter(path, numbers)
    return None


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root, its two outputs together."""
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, cwd=ROOT, env=os.environ | environ, text=True, check=False, **together)  # type: ignore[call-overload, no-any-return]


def prepare(interpreter: Interpreter) -> tuple[Path, str]:
    """Return the Python of an environment with the packages, made unless it is there; and why it cannot be had."""
    folder = ROOT / ".venv-pythons" / interpreter.version
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = f"{PACKAGES}\n{LOCK.read_text()}"
    if not stamp.exists() or stamp.read_text() != wanted:
        made = run(interpreter.path, "-m", "venv", "--without-pip", "--clear", folder)
        if made.returncode == 0:
            pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "-q")
            made = run(*pip, "--no-compile", "--only-binary", ":all:", "-c", LOCK, *PACKAGES)
        if made.returncode:
            return python, next(reversed(made.stdout.strip().splitlines()), "no word of it")
        stamp.write_text(wanted)
    return python, ""


def check(interpreter: Interpreter) -> Outcome:
    """Compile every source with the interpreter, its warnings as errors, and run the tests."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as made:
        compiles = ("-W", "error", "-m", "compileall", "-q", *SOURCES)
        done = run(interpreter.path, *compiles, PYTHONPYCACHEPREFIX=made)
        if done.returncode:
            return Outcome(f"{interpreter.version}: sources do not compile", True, done.stdout)
    python, missing = prepare(interpreter)
    if missing:
        return Outcome(f"{interpreter.version}: sources compile; no tests, for want of packages: {missing}", False)
    sources = os.pathsep.join(str(path) for path in sorted(ROOT.glob("p*/*/src")))
    compiled = str(python.parents[1] / "compiled")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--quick", "-m", "not gpu and not browser and not slow")
    done = run(python, *words, *TESTS, PYTHONPATH=sources, PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=compiled)
    last = next(reversed(done.stdout.strip().splitlines()), "no output").strip("= ")
    line = f"{interpreter.version}: sources compile; {last}; {time.perf_counter() - started:.0f} s in all"
    return Outcome(line, done.returncode != 0, done.stdout if done.returncode else "")


def main() -> None:
    """Check all that are found, side by side; print a line for each."""
    wanted = {version: find(version) for version in versions()}
    found = [each for each in wanted.values() if each is not None]
    absent = [version for version, each in wanted.items() if each is None]
    names = ", ".join(f"{each.version} ({each.path})" for each in found)
    print(f"pythons: found {names or 'none'}; not found: {', '.join(absent) or 'none'}", flush=True)
    with ThreadPoolExecutor(max_workers=max(1, len(found))) as pool:
        outcomes = list(pool.map(check, found))
    for outcome in outcomes:
        print(f"{outcome.output}pythons: {outcome.line}", flush=True)
    sys.exit(any(outcome.has_failed for outcome in outcomes))


if __name__ == "__main__":
    main()
