"""The tests of ``kernels/`` in Triton's interpreter."""

from pathlib import Path

import pytest

from tests.interpreted import run_interpreted

pytest.importorskip("triton")
KERNELS = Path(__file__).parent / "kernels"
RUNS = {"attention": ["attention"], "decoder": ["decoder"], "rows": ["activations", "norms", "rotary"]}


def test_no_file_is_left_out() -> None:
    assert {file.stem for file in KERNELS.glob("test_*.py")} == {
        f"test_{name}" for run in RUNS.values() for name in run
    }


@pytest.mark.parametrize("name", RUNS)
def test_kernels_give_what_torch_gives(name: str, tmp_path: Path) -> None:
    run_interpreted([KERNELS / f"test_{part}.py" for part in RUNS[name]], tmp_path)
