"""Operators that need not run at each call: those of constants alone, those nobody reads, those made twice."""

from __future__ import annotations

from dataclasses import replace

import torch

from mlsys_nimble.backends.reference.operators import compile_operator
from mlsys_nimble.ir.operators import Copy
from mlsys_nimble.ir.program import Program, ValueId, ValueType
from mlsys_nimble.passes.rewrite import Rewriter, is_random

MAX_GROWN_NBYTES = 1 << 20  # a result larger than its inputs is kept only up to this size


def fold_constants(program: Program) -> Program:
    """Compute operators of constants, unless the result is much larger than their inputs.

    Constants that a call changes, and operators that draw random numbers, are left alone.
    """
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        tensors = [rewriter.constant(value) for value in operator.inputs]
        if any(tensor is None for tensor in tensors) or is_random(operator.kind):
            continue
        is_result = not rewriter.kept.isdisjoint(operator.outputs)
        if is_result and (isinstance(operator.kind, Copy) or len(operator.outputs) > 1):
            continue
        types = [rewriter.type(value) for value in operator.outputs]
        if _nbytes(types) > max(MAX_GROWN_NBYTES, _nbytes([rewriter.type(value) for value in operator.inputs])):
            continue
        with torch.no_grad():
            made = compile_operator(operator, rewriter.values)(*tensors)
        results = [made] if isinstance(made, torch.Tensor) else list(made)
        if is_result:  # every call must return a new tensor
            folded = rewriter.add_constant(results[0].detach().contiguous())
            rewriter.replace(position, replace(operator, kind=Copy(), inputs=(folded,)))
            continue
        rewriter.drop(operator)
        for value, result in zip(operator.outputs, results, strict=True):
            rewriter.constants[value] = result.detach().contiguous()
    return rewriter.build()


def _nbytes(types: list[ValueType]) -> int:
    return sum(type_.nbytes for type_ in types)


def remove_dead_code(program: Program) -> Program:
    """Remove operators that contribute to no output and no mutation, and unread constants."""
    needed = set(program.kept())
    operators = []
    for operator in reversed(program.operators):
        if needed.intersection(operator.outputs):
            needed.update(operator.inputs)
            operators.append(operator)
    needed.update(old for old, _ in program.mutations)
    constants = {value: tensor for value, tensor in program.constants.items() if value in needed}
    return Program(
        program.values, tuple(reversed(operators)), program.inputs, program.outputs, constants, program.mutations
    )


def share_subexpressions(program: Program) -> Program:
    """Keep one of the operators that do the same to the same values. Results and copies stay tensors of their own."""
    rewriter = Rewriter(program)
    seen: dict[tuple[object, ...], tuple[ValueId, ...]] = {}
    for _, operator in rewriter:
        if (
            isinstance(operator.kind, Copy)
            or is_random(operator.kind)
            or rewriter.lasting.intersection(operator.outputs)
        ):
            continue
        types = tuple(rewriter.type(value) for value in operator.outputs)
        key = (repr(operator.kind), operator.inputs, types)  # repr: 1, 1.0 and True differ
        first = seen.setdefault(key, operator.outputs)
        if first is not operator.outputs and len(first) == 1:
            rewriter.substitute(operator, first[0])
    return rewriter.build()
