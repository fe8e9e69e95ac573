"""Indexing by integer tensors: gathered rows, rows added to; and tensors made from numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.ir.operators import Expand, Gather, ScatterAdd
from mlsys_nimble.ir.program import ValueType

_INDICES = ("int64", "int32")


@rule("aten.index.Tensor")
def _index(b: Builder, result: ValueType, x: Ref, indices: Sequence[Ref | None]) -> Any:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype not in _INDICES:
        return NotImplemented
    return gathered(b, x, *given[0], wraps=True)


@rule("aten.index_select")
def _index_select(b: Builder, result: ValueType, x: Ref, dim: int, index: Ref) -> Any:
    if not x.rank or index.rank != 1 or index.dtype not in _INDICES:
        return NotImplemented
    return gathered(b, x, dim % x.rank, index, wraps=False)


def gathered(b: Builder, x: Ref, dim: int, index: Ref, *, wraps: bool) -> Ref:
    """Take elements of one dimension of x; the dimensions of ``index`` stand in its place."""
    rows = b.permute(x, [dim, *(d for d in range(x.rank) if d != dim)])
    found = b.emit(Gather(wraps), [rows, index], ValueType((*index.shape, *rows.shape[1:]), x.dtype))
    own, lead = range(index.rank), range(index.rank, index.rank + dim)
    return b.permute(found, [*lead, *own, *range(index.rank + dim, found.rank)])


@rule("aten.index_add")
def _index_add(b: Builder, result: ValueType, x: Ref, dim: int, index: Ref, source: Ref, *, alpha: float = 1) -> Any:
    whole = not x.rank or index.rank != 1 or index.dtype not in _INDICES
    if whole or alpha != 1 or x.dtype not in ("float32", "float64") or source.dtype != x.dtype:
        return NotImplemented
    dim %= x.rank
    first = [dim, *(d for d in range(x.rank) if d != dim)]
    rows = b.permute(x, first)
    made = b.emit(ScatterAdd(), [rows, index, b.permute(source, first)], rows.type)
    return b.permute(made, [first.index(d) for d in range(x.rank)])


@rule("aten.scatter_add")
def _scatter_add(b: Builder, result: ValueType, x: Ref, dim: int, index: Ref, source: Ref) -> Any:
    """Take an index that is the same all along the other dimensions, as graph nets expand it, for that of rows."""
    expanded = b.producer(index)
    if expanded is None or not isinstance(expanded.kind, Expand) or index.shape != source.shape:
        return NotImplemented
    type_ = b.values[expanded.inputs[0]]
    dim %= max(x.rank, 1)
    one_each = tuple(size if d == dim else 1 for d, size in enumerate(index.shape))
    rest = [tuple(size for d, size in enumerate(each.shape) if d != dim) for each in (x, source)]
    if type_.shape != one_each or rest[0] != rest[1]:
        return NotImplemented
    rows = b.reshape(Ref(expanded.inputs[0], type_), (index.shape[dim],))
    return _index_add(b, result, x, dim, rows, source)


@rule("aten.zeros_like", "aten.new_zeros", "aten.empty_like", "aten.new_empty", "aten.empty.memory_format", "aten.zero")
def _zeros(b: Builder, result: ValueType, *args: Any, **kwargs: Any) -> Ref:
    return b.full(result, 0)


@rule("aten.ones_like", "aten.new_ones")
def _ones(b: Builder, result: ValueType, *args: Any, **kwargs: Any) -> Ref:
    return b.full(result, 1)


@rule("aten.full_like", "aten.fill.Scalar")
def _full_like(b: Builder, result: ValueType, x: Ref, value: Any, **kwargs: Any) -> Ref:
    return b.full(result, value)


@rule("aten.new_full")
def _new_full(b: Builder, result: ValueType, x: Ref, size: Any, value: Any, **kwargs: Any) -> Ref:
    return b.full(result, value)


@rule("aten.fill.Tensor")
def _fill(b: Builder, result: ValueType, x: Ref, value: Ref) -> Ref:
    return b.expand(b.cast(value, result.dtype), result.shape)
