"""The tests of ``kernels/`` in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreted import run_interpreted

pytest.importorskip("triton")


def test_printed_kernels_give_what_torch_gives(tmp_path: Path):
    run_interpreted([Path(__file__).parent / "kernels"], tmp_path)
