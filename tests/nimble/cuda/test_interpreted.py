"""Runs the tests of ``kernels/`` in Triton's interpreter, which a process has or has not from its start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
KERNELS = Path(__file__).parent / "kernels"


def test_printed_kernels_give_what_torch_gives(tmp_path: Path):
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "run")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(KERNELS)],
        env=environment | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout)
