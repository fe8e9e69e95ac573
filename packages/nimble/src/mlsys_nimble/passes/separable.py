"""Fusion of depthwise and 1x1 convolutions whose intermediate result the caches cannot hold."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from mlsys_nimble.ir.operators import Convolution, Separable
from mlsys_nimble.ir.program import Operator, Program
from mlsys_nimble.passes.rewrite import Rewriter

LEAST_NBYTES = 384 << 10  # of the intermediate result; a smaller one stays in the second-level cache
MOST_WEIGHTS_NBYTES = 128 << 10  # of the 1x1 convolution, which are read once for every row of pixels


def fuse_separables(program: Program) -> Program:
    """Fuse the pairs that gain by it: small weights, a large intermediate result."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        first = rewriter.sole_producer(operator.inputs[0]) if operator.inputs else None
        if first is None or not _is_pointwise(rewriter, operator) or not _is_depthwise(rewriter, first):
            continue
        weight, between = rewriter.type(operator.inputs[1]), rewriter.type(first.outputs[0])
        if between.nbytes < LEAST_NBYTES or weight.nbytes > MOST_WEIGHTS_NBYTES:
            continue
        assert isinstance(first.kind, Convolution)
        assert isinstance(operator.kind, Convolution)
        kind = Separable(first.kind, operator.kind)
        rewriter.replace(position, replace(operator, kind=kind, inputs=(*first.inputs, *operator.inputs[1:])))
        rewriter.drop(first)
    return rewriter.build()


def _is_pointwise(rewriter: Rewriter, operator: Operator) -> bool:
    kind = operator.kind
    return (
        isinstance(kind, Convolution)
        and _is_plain(rewriter, operator)
        and prod(rewriter.type(operator.inputs[1]).shape[2:]) == 1
        and kind.groups == 1
        and {*kind.stride} == {1}
        and not any(map(any, kind.padding))
    )


def _is_depthwise(rewriter: Rewriter, operator: Operator) -> bool:
    kind = operator.kind
    if not isinstance(kind, Convolution) or not _is_plain(rewriter, operator) or kind.epilogue.has_residual:
        return False
    weight = rewriter.type(operator.inputs[1])
    return weight.shape[1] == 1 and kind.groups == weight.shape[0]


def _is_plain(rewriter: Rewriter, operator: Operator) -> bool:
    """Return whether it is a float32 convolution over planes whose parameters are constants."""
    assert isinstance(operator.kind, Convolution)
    parameters = operator.inputs[1 : 2 + operator.kind.has_bias]
    return (
        len(operator.kind.stride) == 2
        and rewriter.type(operator.outputs[0]).dtype == "float32"
        and all(rewriter.constant(value) is not None for value in parameters)
    )
