"""A part of the oracle in ``make test``: programs that mix behind a bound, and such that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.oracles.isolation.programs import Program, fault, programs


@settings(max_examples=20, deadline=None)
@given(programs())
def test_an_operator_that_mixes_behind_a_bound_is_named(program: Program):
    """Whatever bound hides it, and whatever steps stand around it; without one no operator is."""
    assert fault(program) is None


def test_an_operator_of_onnx_that_mixes_behind_a_bound_is_named(tmp_path: Path):
    """The same of ONNX files that ONNX Runtime runs as one stage, of any batch size or one."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    from tests.oracles.isolation.onnx_programs import OnnxProgram, onnx_fault, onnx_programs

    @settings(max_examples=8, deadline=None)
    @given(onnx_programs())
    def judge(program: OnnxProgram) -> None:
        assert onnx_fault(program, tmp_path / "drawn.onnx") is None

    judge()
