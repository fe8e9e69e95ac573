"""Run tests of Triton's kernels in its interpreter, which a process has or has not from its start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def run_interpreted(paths: Iterable[Path], folder: Path) -> None:
    """Run the test files or folders in a process of their own, which keeps its files in ``folder``; they must pass."""
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(folder / "run")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, paths)],
        env=environment | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout)
