"""torch's own modules through DVABatch's and BatchMaker's executors: ``make oracles``.

Every class of torch's own module tests, three argument lists each, in evaluation and in training, among 24 requests;
400 requests of Triton's clients, REST and gRPC, every ninth at fault; then 2,000 programs and 500 ONNX files, half of
which mix.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import Phase, given, settings

from tests.oracles.isolation.catalogue import cases
from tests.oracles.isolation.clients import many_clients
from tests.oracles.isolation.judge import by_cells, by_stages, judge
from tests.oracles.isolation.onnx_programs import OnnxProgram, onnx_fault, onnx_programs
from tests.oracles.isolation.programs import Program, fault, programs
from tests.oracles.tally import Tally


def drawn_programs(tally: Tally, number: int) -> None:
    """Count programs that are refused if they mix, and let through if they do not."""

    @settings(max_examples=number, deadline=None, database=None, phases=[Phase.generate])
    @given(programs())
    def judge_program(program: Program) -> None:
        count(fault(program), is_mixing=program.mixing is not None)

    @settings(max_examples=number // 4, deadline=None, database=None, phases=[Phase.generate])
    @given(onnx_programs())
    def judge_onnx(program: OnnxProgram) -> None:
        count(onnx_fault(program, path), is_mixing=program.mixing is not None)

    def count(what: str | None, *, is_mixing: bool) -> None:
        tally.add("wrong" if what else "refused" if is_mixing else "equal", what or "")

    judge_program()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.onnx"
        judge_onnx()


def main(per_class: int = 3) -> int:
    """Run all and print the tally; 1 if an answer was wrong or an exception raw."""
    warnings.simplefilter("ignore")
    for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they tell of what export refuses
    tally = Tally()
    for number, case in enumerate(cases(per_class)):
        judge(tally, case, "stages", by_stages)
        judge(tally, case, "cells", by_cells)
        if number % 50 == 49:
            print(tally.line(f"up to {case.name}"), flush=True)
    many_clients(tally, requests=400)
    drawn_programs(tally, 2000)
    return tally.report("isolation")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
