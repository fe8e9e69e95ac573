"""Replays of random and of short graphs as a program of its own; `make sanitize` runs it under the thread sanitiser."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import INCLUDE
from mlsys_core.native.compiler import find_compiler
from mlsys_nimble.backends.cpu import replay

SOURCE = Path(__file__).with_name("replay_check.cpp")


def test_helpers_that_come_late_or_leave_early_spoil_nothing(tmp_path: Path):
    try:
        compiler = find_compiler()
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    program, include = tmp_path / "check", Path(replay.__file__).parent
    compiler.compile(SOURCE, program, ["-std=c++17", "-O2", "-pthread", f"-I{INCLUDE}", f"-I{include}"])
    finished = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert finished.stdout == "40 graphs, 8,000 replays: right sums\n"
