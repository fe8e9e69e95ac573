"""Runs the tests of ``kernels/`` in Triton's interpreter, which a process has or has not from its start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
KERNELS = Path(__file__).parent / "kernels"
RUNS = {"attention": ["attention"], "decoder": ["decoder"], "rows": ["activations", "norms", "rotary"]}


def test_no_file_is_left_out() -> None:
    assert {file.stem for file in KERNELS.glob("test_*.py")} == {
        f"test_{name}" for run in RUNS.values() for name in run
    }


@pytest.mark.parametrize("name", RUNS)
def test_kernels_give_what_torch_gives(name: str, tmp_path: Path) -> None:
    files = [KERNELS / f"test_{part}.py" for part in RUNS[name]]
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", tmp_path / "run"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env=environment | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"\d+ passed", run.stdout)
