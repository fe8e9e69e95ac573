"""Checks of every pass: the program computes the same, and its declared types are true."""

from __future__ import annotations

from typing import Any, Protocol

import pytest
import torch
from mlsys_nimble.backends.reference.operators import ReferenceExecutor, compile_operator
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Pointwise, Step
from mlsys_nimble.ir.program import Operator, Program, ValueType, check_program
from mlsys_nimble.passes import Pass
from torch import nn


class Rewrite(Protocol):
    """Run passes over a model, or over a program written by hand, and check each."""

    def __call__(self, passes: tuple[Pass, ...], model: Any, *args: torch.Tensor) -> Program:
        """Return the program after the last pass."""
        ...


def rewrite(passes: tuple[Pass, ...], model: Any, *args: torch.Tensor) -> Program:
    """Run the passes as :class:`Rewrite` says."""
    program = model if isinstance(model, Program) else _captured(model, args)
    has_sources = all(operator.source for operator in program.operators)
    for function in passes:
        changed = function(program)
        check_program(changed)
        assert all(operator.name for operator in changed.operators)
        assert all(operator.source for operator in changed.operators) or not has_sources, "a message has no place"
        used = {value for operator in changed.operators for value in operator.inputs}
        assert set(changed.constants) <= used | {*changed.outputs} | {old for old, _ in changed.mutations}
        for _ in range(2):
            fresh = [torch.randn_like(x) if x.is_floating_point() else x for x in args]
            expected = ReferenceExecutor(program).run([x.clone() for x in fresh])
            got = ReferenceExecutor(changed).run([x.clone() for x in fresh])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        _check_types(changed, fresh)
        program = changed
    return program


def _captured(model: Any, args: tuple[torch.Tensor, ...]) -> Program:
    return capture(model.eval() if isinstance(model, nn.Module) else model, args).program


def _check_types(program: Program, inputs: list[torch.Tensor]) -> None:
    """Every value has the type that the program declares."""
    tensors = dict(program.constants) | dict(zip(program.inputs, inputs, strict=True))
    for operator in program.operators:
        made = compile_operator(operator, program.values)(*[tensors[value] for value in operator.inputs])
        made = [made] if isinstance(made, torch.Tensor) else made
        tensors.update(zip(operator.outputs, made, strict=True))
    for value, tensor in tensors.items():
        assert program.values[value] == ValueType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")), value


@pytest.fixture
def rewritten() -> Rewrite:
    """See :class:`Rewrite`."""
    return rewrite


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
