"""Operators that only move elements: views, concatenations, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlsys_nimble.capture.builder import Builder, Ref
from mlsys_nimble.capture.rules import rule
from mlsys_nimble.errors import refuse
from mlsys_nimble.ir.operators import Aten, Input, Pad
from mlsys_nimble.ir.program import ValueType


@rule(
    "aten.view.default",
    "aten._unsafe_view",
    "aten.reshape",
    "aten._reshape_alias",
    "aten.view_as",
    "aten.reshape_as",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.squeeze",
    "aten.unsqueeze",
    "aten.ravel",
    "aten.atleast_1d",
    "aten.atleast_2d",
)
def _reshape(b: Builder, result: ValueType, x: Ref, *args: Any) -> Any:
    return b.reshape(x, result.shape) if isinstance(result, ValueType) else NotImplemented


@rule("aten.permute")
def _permute(b: Builder, result: ValueType, x: Ref, dims: Sequence[int]) -> Ref:
    return b.permute(x, dims)


@rule("aten.t", "aten.numpy_T", "aten.mT", "aten.adjoint")
def _t(b: Builder, result: ValueType, x: Ref) -> Any:
    if x.rank == 2 and not x.dtype.startswith("complex"):
        return b.permute(x, (1, 0))
    return x if x.rank < 2 else NotImplemented


@rule("aten.transpose.int", "aten.swapaxes", "aten.swapdims")
def _transpose(b: Builder, result: ValueType, x: Ref, one: int, other: int) -> Ref:
    dims = list(range(x.rank))
    if dims:
        dims[one], dims[other] = dims[other], dims[one]
    return b.permute(x, dims)


@rule("aten.movedim.int")
def _movedim(b: Builder, result: ValueType, x: Ref, source: int, destination: int) -> Ref:
    dims = list(range(x.rank))
    if dims:
        dims.insert(destination % x.rank, dims.pop(source))
    return b.permute(x, dims)


@rule("aten._neg_view")
def _neg_view(b: Builder, result: ValueType, x: Ref) -> Ref:
    """Compute what torch says by a bit of the tensor: values of a program carry none."""
    if x.dtype == "bool":
        raise refuse("a negative view of bools", b.site.source, "Torch cannot compute its values: use ~x.")
    return b.emit(Aten("aten.neg.default", (Input(0),)), [x], result)


@rule("aten._conj")
def _conj(b: Builder, result: ValueType, x: Ref) -> Ref:
    return b.emit(Aten("aten._conj_physical.default", (Input(0),)), [x], result)


@rule("aten.slice.Tensor")
def _slice(
    b: Builder, result: ValueType, x: Ref, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Ref:
    dim %= x.rank
    first = slice(start, end, step).indices(x.shape[dim])[0]
    return b.slice(x, dim, min(first, x.shape[dim]), result.shape[dim], step)


@rule("aten.select.int")
def _select(b: Builder, result: ValueType, x: Ref, dim: int, index: int) -> Ref:
    dim %= x.rank
    return b.select(x, dim, index % x.shape[dim])


@rule("aten.narrow.default")
def _narrow(b: Builder, result: ValueType, x: Ref, dim: int, start: int, length: int) -> Ref:
    dim %= x.rank
    return b.slice(x, dim, start % x.shape[dim] if start < 0 else start, length)


@rule("aten.unbind.int")
def _unbind(b: Builder, results: list[ValueType], x: Ref, dim: int = 0) -> list[Ref]:
    return [b.select(x, dim % x.rank, index) for index in range(len(results))]


@rule(
    "aten.split.Tensor",
    "aten.split.sizes",
    "aten.split_with_sizes",
    "aten.chunk",
    "aten.unsafe_split",
    "aten.unsafe_split_with_sizes",
    "aten.unsafe_chunk",
    "aten.tensor_split.sections",
    "aten.tensor_split.indices",
)
def _split(b: Builder, results: list[ValueType], x: Ref, sizes: Any, dim: int = 0) -> list[Ref]:
    dim %= x.rank
    parts, start = [], 0
    for result in results:
        parts.append(b.slice(x, dim, start, result.shape[dim]))
        start += result.shape[dim]
    return parts


@rule("aten.as_strided", "aten.as_strided_copy")
def _as_strided(
    b: Builder, result: ValueType, x: Ref, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Ref:
    """Gather elements by index: the strides of ``x`` are planned later. The tracer checked that it is row-major."""
    return b.emit(Aten("aten.take.default", (Input(0), Input(1))), [x, _places(b, x, size, stride, offset)], result)


@rule("aten.as_strided_scatter")
def _as_strided_scatter(b: Builder, result: ValueType, x: Ref, part: Ref, *layout: Any) -> Ref:
    """Write elements by index: the offset is within the storage of ``x``, which is planned later."""
    kind = Aten("aten.put.default", (Input(0), Input(1), Input(2)))
    return b.emit(kind, [x, _places(b, x, *layout), part], result)


def _places(b: Builder, x: Ref, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Ref:
    numbers = torch.arange(x.type.numel, device=b.device).as_strided(size, stride, offset or 0)
    return b.constant(numbers.contiguous())


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to")
def _expand(b: Builder, result: ValueType, x: Ref, *args: Any, **kwargs: Any) -> Ref:
    return b.expand(x, result.shape)


@rule("aten.broadcast_tensors")
def _broadcast(b: Builder, results: list[ValueType], tensors: list[Ref]) -> list[Ref]:
    return [b.expand(x, result.shape) for x, result in zip(tensors, results, strict=True)]


@rule("aten.repeat", "aten.tile")
def _repeat(b: Builder, result: ValueType, x: Ref, repeats: Sequence[int]) -> Any:
    rank = len(result.shape)
    if 0 in result.shape:
        return NotImplemented
    shape = (1,) * (rank - x.rank) + x.shape
    times = [size // one for size, one in zip(result.shape, shape, strict=True)]
    y = b.reshape(x, [n for one in shape for n in (1, one)])
    y = b.expand(y, [n for count, one in zip(times, shape, strict=True) for n in (count, one)])
    return b.reshape(y, result.shape)


@rule("aten.repeat_interleave.self_int")
def _repeat_interleave(b: Builder, result: ValueType, x: Ref, repeats: int, dim: int | None = None, **_: Any) -> Any:
    if dim is None or 0 in result.shape:
        return NotImplemented
    dim %= x.rank
    head, tail = x.shape[: dim + 1], x.shape[dim + 1 :]
    y = b.expand(b.reshape(x, (*head, 1, *tail)), (*head, repeats, *tail))
    return b.reshape(y, result.shape)


@rule("aten.cat", "aten.concat.default", "aten.concatenate.default")
def _cat(b: Builder, result: ValueType, tensors: list[Ref], dim: int = 0) -> Ref:
    rank = len(result.shape)
    parts = [part for part in tensors if part.rank == rank]  # torch allows empty vectors among the others
    return b.concat([b.cast(part, result.dtype) for part in parts], dim % rank)


@rule("aten.stack")
def _stack(b: Builder, result: ValueType, tensors: list[Ref], dim: int = 0) -> Ref:
    dim %= len(result.shape)
    shape = (*result.shape[:dim], 1, *result.shape[dim + 1 :])
    return b.concat([b.cast(b.reshape(part, shape), result.dtype) for part in tensors], dim)


@rule("aten.roll")
def _roll(b: Builder, result: ValueType, x: Ref, shifts: Any, dims: Any = ()) -> Any:
    shifts, dims = _tuple(shifts), _tuple(dims)
    if not dims or 0 in x.shape:
        return NotImplemented
    for shift, dim in zip(shifts, dims, strict=True):
        axis, size = dim % x.rank, x.shape[dim]
        cut = (size - shift % size) % size
        if cut:
            x = b.concat([b.slice(x, axis, cut, size - cut), b.slice(x, axis, 0, cut)], axis)
    return x


@rule("aten.pixel_shuffle")
def _pixel_shuffle(b: Builder, result: ValueType, x: Ref, factor: int) -> Any:
    *batch, channels, height, width = x.shape
    n, c = len(batch), channels // factor**2
    y = b.reshape(x, (*batch, c, factor, factor, height, width))
    y = b.permute(y, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return b.reshape(y, result.shape)


@rule("aten.pixel_unshuffle")
def _pixel_unshuffle(b: Builder, result: ValueType, x: Ref, factor: int) -> Any:
    *batch, channels, height, width = x.shape
    n = len(batch)
    y = b.reshape(x, (*batch, channels, height // factor, factor, width // factor, factor))
    y = b.permute(y, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return b.reshape(y, result.shape)


@rule("aten.upsample_nearest2d.vec", "aten.upsample_nearest2d.default")
def _upsample_nearest(b: Builder, result: ValueType, x: Ref, *args: Any) -> Any:
    if 0 in x.shape or any(out % size for out, size in zip(result.shape, x.shape, strict=True)):
        return NotImplemented
    n, c, height, width = x.shape
    times_h, times_w = result.shape[2] // height, result.shape[3] // width
    y = b.expand(b.reshape(x, (n, c, height, 1, width, 1)), (n, c, height, times_h, width, times_w))
    return b.reshape(y, result.shape)


@rule("aten.constant_pad_nd")
def _constant_pad(b: Builder, result: ValueType, x: Ref, pad: Sequence[int], value: float = 0) -> Any:
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    amounts = [(0, 0)] * (x.rank - len(pairs)) + pairs[::-1]
    if isinstance(value, complex) or float(value) != value == value:
        return NotImplemented
    return b.emit(Pad(tuple(amounts), float(value)), [x], result)


@rule("aten.pad")
def _pad(
    b: Builder, result: ValueType, x: Ref, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    return _constant_pad(b, result, x, pad, value or 0.0) if mode == "constant" else NotImplemented


def _tuple(item: Any) -> tuple[int, ...]:
    return tuple(item) if isinstance(item, list | tuple) else (item,)
