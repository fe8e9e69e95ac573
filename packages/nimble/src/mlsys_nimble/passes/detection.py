"""Detection of operators that a graph spells out: attention written by hand, and gathers at constant indices.

``softmax(q @ k.T * scale + mask) @ v`` becomes one operator. Pixels taken by constant indices become a native gather of
rows, where torch would take them between segments: torch decomposes bilinear and bicubic interpolation into reads of 4
or 16 neighbours, ``x[:, :, rows, columns]``, and sums of them. Images are channels last, so a pixel's channels are a
row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from mlsys_nimble.ir.operators import Aten, Attention, Gather, Input, MatMul, Permute, Pointwise, Reshape, Softmax
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


_TARGETS = ("aten._unsafe_index.Tensor", "aten.index.Tensor")
_INDICES = (torch.int64, torch.int32)


def find_points(program: Program) -> Program:
    """Let one gather read neighbouring dimensions at constant indices, joined to one number for each element."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        dims = _indexed_dims(operator)
        if len(dims) < 2 or dims != list(range(dims[0], dims[-1] + 1)):
            continue
        shape = rewriter.type(operator.inputs[0]).shape
        tensors = [rewriter.constant(value) for value in operator.inputs[1:]]
        if any(tensor is None or tensor.dtype not in _INDICES for tensor in tensors):
            continue
        rows = _joined(tensors, [shape[dim] for dim in dims])
        if rows is not None:
            _gather(rewriter, position, operator, dims, rows)
    return rewriter.build()


def _indexed_dims(operator: Operator) -> list[int]:
    """Return the dimensions that an operator indexes by tensors, each by an input of its own; none for other kinds."""
    kind = operator.kind
    if not isinstance(kind, Aten) or kind.target not in _TARGETS or kind.keywords or len(kind.arguments) != 2:
        return []
    x, indices = kind.arguments
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    wanted = [Input(number) for number in range(len(dims) + 1)]
    given = [x, *(indices[dim] for dim in dims)]
    return dims if given == wanted and len(operator.inputs) == len(wanted) else []


def _joined(indices: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor | None:
    """Return row-major numbers of the elements that indices name, broadcast; None if one is outside of its size."""
    total = torch.zeros((), dtype=torch.int64)
    for index, size in zip(indices, sizes, strict=True):
        if index.numel() == 0 or int(index.min()) < -size or int(index.max()) >= size:
            return None
        wrapped = torch.where(index < 0, index + size, index)
        total = total * size + wrapped
    return total.contiguous()


def _gather(rewriter: Rewriter, position: int, operator: Operator, dims: Sequence[int], rows: torch.Tensor) -> None:
    """Replace the operator: indexed dimensions first, one row for each element of these, and back."""
    type_ = rewriter.type(operator.inputs[0])
    rest = [dim for dim in range(len(type_.shape)) if dim not in dims]
    first, last = tuple(type_.shape[dim] for dim in dims), tuple(type_.shape[dim] for dim in rest)

    def step(
        what: str, kind: Permute | Reshape | Gather, inputs: tuple[ValueId, ...], shape: tuple[int, ...]
    ) -> ValueId:
        return rewriter.insert(position, f"{operator.name}.{what}", kind, inputs, ValueType(shape, type_.dtype))

    moved = step("moved", Permute((*dims, *rest)), (operator.inputs[0],), (*first, *last))
    table = step("table", Reshape(), (moved,), (prod(first), prod(last)))
    numbers = rewriter.add_constant(rows)
    found = step("rows", Gather(wraps=False), (table, numbers), (*rows.shape, prod(last)))
    split = step("split", Reshape(), (found,), (*rows.shape, *last))
    before, rank = dims[0], rows.dim()  # the indices' dimensions stand where the indexed ones were
    back = (*range(rank, rank + before), *range(rank), *range(rank + before, rank + len(last)))
    rewriter.replace(
        position,
        Operator(operator.name, Permute(back), (split,), operator.outputs, operator.source),
    )
