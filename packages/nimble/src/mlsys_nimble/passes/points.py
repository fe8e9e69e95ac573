"""Pixels taken by constant indices become a native gather of rows, where torch would take them between segments.

A resize of an image is such a read: torch decomposes bilinear and bicubic interpolation into reads of 4 or 16
neighbours, ``x[:, :, rows, columns]``, and sums of them. Images are channels last, so a pixel's channels are a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from mlsys_nimble.ir.operators import Aten, Gather, Input, Permute, Reshape
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from mlsys_nimble.passes.rewrite import Rewriter

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
