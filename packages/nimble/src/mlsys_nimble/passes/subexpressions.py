"""Common subexpression elimination: equal operators on the same values run once."""

from __future__ import annotations

from mlsys_nimble.ir.operators import Copy
from mlsys_nimble.ir.program import Program, ValueId
from mlsys_nimble.passes.rewrite import Rewriter, is_random


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
