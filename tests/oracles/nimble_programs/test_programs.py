"""Random programs of views, joins, reductions, broadcasts and writes give what eager gives; the same ones each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mlsys_nimble.backends import table
from mlsys_nimble.backends.operators.shapes import copy
from mlsys_nimble.ir.operators import Reshape
from mlsys_nimble.ir.strides import dense, row_major
from mlsys_nimble.passes import folding

from tests.oracles.nimble_programs.programs import Program
from tests.oracles.nimble_programs.run import draw, judged


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("path", "count"),
    [("native", 150), ("reference", 50), ("compile", 8), ("training", 10), ("compiled training", 6)],
)
def test_random_programs_give_what_eager_gives(path: str, count: int):
    tally = draw(path, count)
    assert tally.faults == []
    assert tally.counts["equal"] > count * 0.8


COLUMNS = Program(
    (("float32", (2, 1)), ("float32", (8,))),
    (("expand", (0,), ((2, 4),)), ("cat as columns", (2, 1), ())),
    (3,),
    owns_inputs=True,
)
DIFFERENCE = Program(
    (("float32", (2, 8)),), (("linear", (0,), ()), ("number minus", (1,), (3.0,))), (2,), owns_inputs=True
)


def test_a_fault_of_a_pass_is_wrong(monkeypatch: pytest.MonkeyPatch):
    applied = folding._applied

    def without_sign(op: str, arguments: list[Any]) -> Any:
        found = applied(op, arguments)
        return (-found[0], found[1]) if op == "sub" and isinstance(arguments[1], tuple) else found

    assert judged(DIFFERENCE, "reference").verdict == "equal"
    monkeypatch.setattr(folding, "_applied", without_sign)
    assert judged(DIFFERENCE, "reference").verdict == "wrong"


def test_a_fault_of_a_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch):
    def as_if_dense(call: Any) -> Any:
        shape = call.inputs[0].shape
        return copy(call.inputs[0], call.out.reshaped(shape, dense(shape, row_major(len(shape)))))

    assert judged(COLUMNS, "native").verdict == "equal"
    monkeypatch.setattr(table.find(Reshape), "lower", as_if_dense)
    assert judged(COLUMNS, "native").verdict == "wrong"
