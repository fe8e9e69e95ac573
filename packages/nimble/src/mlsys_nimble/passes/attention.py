"""Detection of attention written by hand: softmax(q @ k.T * scale + mask) @ v becomes one operator."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlsys_nimble.ir.operators import Attention, MatMul, Permute, Pointwise, Softmax
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from mlsys_nimble.passes.rewrite import Rewriter


@dataclass(slots=True)
class _Scores:
    """Operators that compute ``scale * product + mask``, the softmax's input."""

    product: Operator
    scale: float
    mask: ValueId | None
    between: list[Operator]  # scales and mask addition with no other reader, last first


def find_attention(program: Program) -> Program:
    """Replace product, scale, mask, softmax, product by one :class:`Attention`, over four dimensions."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        if not isinstance(operator.kind, MatMul) or operator.kind.scale != 1:
            continue
        weights = rewriter.sole_producer(operator.inputs[0])
        if weights is None or not isinstance(weights.kind, Softmax) or weights.kind.is_log:
            continue
        shape = rewriter.type(weights.outputs[0]).shape
        if len(shape) != 4 or weights.kind.dim != 3 or 0 in shape:
            continue
        scores = _scores(rewriter, weights.inputs[0])
        if scores is None:
            continue
        q, keys = scores.product.inputs
        type_ = rewriter.type(keys)
        *batch, depth, length = type_.shape
        swapped = ValueType((*batch, length, depth), type_.dtype)
        k = rewriter.insert(position, f"{operator.name}.keys", Permute((0, 1, 3, 2)), (keys,), swapped)
        kind = Attention(scores.scale, is_causal=False, has_mask=scores.mask is not None, has_zero_rows=False)
        mask = () if scores.mask is None else (scores.mask,)
        rewriter.replace(position, replace(operator, kind=kind, inputs=(q, k, operator.inputs[1], *mask)))
        for done in (weights, *scores.between, scores.product):
            rewriter.drop(done)
    return rewriter.build()


def _scores(rewriter: Rewriter, value: ValueId) -> _Scores | None:
    """Walk back from the softmax's input to the product of queries and keys; None if something else is between."""
    scale, mask = 1.0, None
    between: list[Operator] = []
    shape = rewriter.type(value).shape
    while (operator := rewriter.sole_producer(value)) is not None:
        kind = operator.kind
        if isinstance(kind, MatMul):
            return _Scores(operator, scale * kind.scale, mask, between)
        if not isinstance(kind, Pointwise) or len(kind.steps) != 1 or kind.dtype != rewriter.type(value).dtype:
            return None
        between.append(operator)
        op, (first, *rest) = kind.steps[0].op, kind.steps[0].arguments
        if op in ("mul", "div") and first == 0 and rest and isinstance(rest[0], float):
            scale = scale * rest[0] if op == "mul" else scale / rest[0]
            value = operator.inputs[0]
        elif op == "add" and len(set(operator.inputs)) == 2 and mask is None and scale == 1:
            full = [v for v in operator.inputs if _is_product(rewriter, v, shape)]
            if len(full) != 1:
                return None
            value = full[0]
            mask = next(v for v in operator.inputs if v != value)
        else:
            return None
    return None


def _is_product(rewriter: Rewriter, value: ValueId, shape: tuple[int, ...]) -> bool:
    """Return whether ``value`` is a product, but for scales."""
    operator = rewriter.sole_producer(value)
    while operator is not None and isinstance(operator.kind, Pointwise) and len(operator.inputs) == 1:
        operator = rewriter.sole_producer(operator.inputs[0])
    return operator is not None and isinstance(operator.kind, MatMul) and rewriter.type(value).shape == shape
