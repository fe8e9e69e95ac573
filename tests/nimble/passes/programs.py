"""Programs over rows of four, written by hand."""

from __future__ import annotations

from typing import Any

from mlsys_nimble.ir.operators import Pointwise, Step
from mlsys_nimble.ir.program import Operator, Program, ValueType

TWICE, NEGATED = Pointwise((Step("mul", (0, 2.0)),)), Pointwise((Step("neg", (0,)),))
ADD = Pointwise((Step("add", (0, 1)),))
ROW = ValueType((4,), "float32")


def kinds_of(program: Program) -> list[str]:
    """Return the names of the operators' kinds, in order."""
    return [type(operator.kind).__name__ for operator in program.operators]


def program_of(*operators: Operator, inputs: tuple[int, ...] = (0,), **fields: Any) -> Program:
    """Return a program over rows of four; the last result is the caller's."""
    num_values = 1 + max(value for operator in operators for value in (*operator.inputs, *operator.outputs))
    outputs = fields.pop("outputs", operators[-1].outputs)
    return Program(fields.pop("values", (ROW,) * num_values), operators, inputs, outputs, **fields)
