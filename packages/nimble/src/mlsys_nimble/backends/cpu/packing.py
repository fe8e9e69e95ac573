"""Weights packed in the order in which kernels read them: panels of a few vectors of output columns (gemm.h).

They lie side by side in huge pages: a replay walks through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from typing import Any, ParamSpec

import torch
from mlsys_core.memory.pages import PAGE_NBYTES, advise_huge_pages
from mlsys_nimble.backends.cpu.library import ROW_VECS
from torch import Tensor

REGION_NBYTES = 64 << 20  # asked for at once; pages that are not written to cost nothing
ALIGNMENT = 64  # a cache line
LEAST_NBYTES = 64 << 10  # smaller tensors stay where they are


class LargePages:
    """Regions of huge pages that tensors are copied into, side by side.

    A region lives as long as one of its tensors.
    """

    def __init__(self) -> None:
        self._rest: Tensor | None = None  # rest of the region, uint8

    def place(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy in a region, or the tensor itself where it is small."""
        if tensor.nbytes < LEAST_NBYTES:
            return tensor
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._rest is None or self._rest.numel() < size:
            self._rest = _region(max(size, REGION_NBYTES))
        place, self._rest = self._rest[: tensor.nbytes], self._rest[size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _region(size: int) -> Tensor:
    """Return at least ``size`` bytes that begin with a huge page."""
    region = torch.empty(size + PAGE_NBYTES, dtype=torch.uint8)
    region = region[-region.data_ptr() % PAGE_NBYTES :]
    advise_huge_pages(region.data_ptr(), region.nbytes)
    return region


P = ParamSpec("P")


@dataclass(slots=True)
class _Packed:
    """Packed weights that the kernels of one net share."""

    known: dict[Hashable, tuple[Tensor, Any]] = field(default_factory=dict)
    pages: LargePages = field(default_factory=LargePages)


_SHARED: ContextVar[_Packed | None] = ContextVar("shared", default=None)


@contextmanager
def shared_weights() -> Iterator[None]:
    """Pack each weight only once within the context: the steps of a recurrent layer then read the same cached memory.

    Weights of linears and of 1x1 convolutions are placed side by side in large pages. (Others have several kernels, of
    which the slower are discarded.) Weights must not be written to or freed within the context.
    """
    token = _SHARED.set(_Packed())
    try:
        yield
    finally:
        _SHARED.reset(token)


_GIVEN: ContextVar[Iterator[Tensor] | None] = ContextVar("given", default=None)


@contextmanager
def given_weights(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Take these packed weights within the context in place of packing any, one after another.

    Raises:
        ValueError: there are more or fewer than what is packed, or one has another size or dtype.
    """
    rest = iter(tensors)
    token = _GIVEN.set(rest)
    try:
        yield
    finally:
        _GIVEN.reset(token)
    if next(rest, None) is not None:
        raise ValueError("more packed weights than its kernel reads")


def _packs(size: Callable[P, tuple[int, torch.dtype]]) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """Let a packing function share its results, and take given ones; ``size`` has its result's elements and dtype."""

    def decorated(pack: Callable[P, Tensor]) -> Callable[P, Tensor]:
        @wraps(pack)
        def packed_once(*args: P.args, **kwargs: P.kwargs) -> Tensor:
            given = _GIVEN.get()
            if given is not None:
                found = next(given, None)
                if found is None or (found.numel(), found.dtype) != size(*args, **kwargs):
                    raise ValueError("packed weights of another size than its kernel reads")
                return found
            shared = _SHARED.get()
            if shared is None:
                return pack(*args, **kwargs)
            known = shared.known
            key = (pack.__name__, *map(_identity, args), *kwargs.items())
            if key not in known:
                known[key] = pack(*args, **kwargs), args  # args are kept alive: their addresses are part of the key
            return known[key][0]

        return packed_once

    return decorated


def _whole(columns: int, lanes: int) -> int:
    """Return a number of columns, rounded up to whole vectors."""
    return -(-columns // lanes) * lanes


def _identity(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr(), argument.dtype, argument.shape, argument.stride()
    return argument


def pack_columns(weight: Tensor, lanes: int) -> Tensor:
    """Pack a matrix [K, N] as flat panels, each [K, NR], one after another.

    Panels are two vectors wide. The last has three where the number of vectors is odd, and is padded with zeros.
    """
    k, n = weight.shape
    vecs = -(-n // lanes)
    padded = torch.zeros(k, vecs * lanes, dtype=weight.dtype)
    padded[:, :n] = weight
    num_panels = max(vecs // 2, 1)
    starts = [panel * 2 * lanes for panel in range(num_panels)]
    stops = [*starts[1:], vecs * lanes]
    return torch.cat([padded[:, start:stop].reshape(-1) for start, stop in zip(starts, stops, strict=True)])


@_packs(lambda weight, lanes, dtype=torch.float32: (_whole(weight.shape[0], lanes) * weight.shape[1], dtype))
def pack_gemv(weight: Tensor, lanes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pack a linear's weight [N, K] for a single row: flat panels of 8 vectors of columns, each [K, NR]."""
    n, k = weight.shape
    padded = torch.zeros(k, -(-n // lanes) * lanes, dtype=torch.float32)
    padded[:, :n] = weight.detach().float().T
    panels = torch.split(padded, ROW_VECS * lanes, dim=1)
    return torch.cat([panel.reshape(-1) for panel in panels]).to(dtype)


def _convolution_size(
    weight: Tensor, groups: int, lanes: int, dtype: torch.dtype = torch.float32
) -> tuple[int, torch.dtype]:
    return groups * _whole(weight.shape[0] // groups, lanes) * prod(weight.shape[1:]), dtype


@_packs(_convolution_size)
def pack_convolution(weight: Tensor, groups: int, lanes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Pack a weight [O, C/groups, *kernel] as flat [groups][panels][taps * C/groups][NR]."""
    rows = weight.detach().float().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    matrices = rows.permute(0, 3, 2, 1).reshape(groups, -1, rows.shape[1])  # [groups, K = taps * C/groups, N]
    packed = torch.cat([pack_columns(matrix, lanes) for matrix in matrices]).to(dtype)
    shared = _SHARED.get()
    return packed if shared is None or rows.shape[3] > 1 else shared.pages.place(packed)


def _bias_size(bias: Tensor | None, num_columns: int, groups: int, lanes: int) -> tuple[int, torch.dtype]:
    del bias
    return groups * _whole(num_columns // groups, lanes), torch.float32


@_packs(_bias_size)
def pack_bias(bias: Tensor | None, num_columns: int, groups: int, lanes: int) -> Tensor:
    """Pack a bias [O] (None: zeros) as [groups][columns, padded with zeros to whole vectors]."""
    columns = num_columns // groups
    padded = torch.zeros(groups, -(-columns // lanes) * lanes, dtype=torch.float32)
    if bias is not None:
        padded[:, :columns] = bias.detach().float().reshape(groups, columns)
    return padded


@_packs(lambda weight, lanes: (prod(weight.shape[1:]) * max(weight.shape[0], lanes), torch.float32))
def pack_depthwise(weight: Tensor, lanes: int) -> Tensor:
    """Pack a weight [C, 1, *kernel] as [taps][C], with zeros where there are fewer channels than lanes."""
    channels = weight.shape[0]
    packed = torch.zeros(weight[0].numel(), max(channels, lanes), dtype=torch.float32)
    packed[:, :channels] = weight.detach().float().reshape(channels, -1).T
    return packed


@_packs(lambda weight, lanes: (_whole(weight.shape[0], lanes) * prod(weight.shape[1:]), torch.float32))
def pack_grouped(weight: Tensor, lanes: int) -> Tensor:
    """Pack a weight [O, width, rows, columns] as [vectors of O][rows][width][columns][lane] (grouped.h)."""
    padded = torch.zeros(_whole(weight.shape[0], lanes), *weight.shape[1:], dtype=torch.float32)
    padded[: weight.shape[0]] = weight.detach().float()
    return padded.reshape(-1, lanes, *weight.shape[1:]).permute(0, 3, 2, 4, 1).contiguous()


_POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, 0.625, -0.625, 1.5, -1.5)}  # finite points by tile size (winograd.h)


def _filter_points(size: int) -> Tensor:
    """Return the matrix [size + 2, 3] from three taps to a tile's points (Lavin and Gray 2015, section 4)."""
    points = _POINTS[size]
    rows = [
        [power / prod(point - other for other in points if other != point) for power in (1.0, point, point * point)]
        for point in points
    ]
    if size == 2:  # winograd.h negates the pixels of the first point
        rows[0] = [-value for value in rows[0]]
    return torch.tensor([*rows, [0.0, 0.0, 1.0]], dtype=torch.float64)


@_packs(lambda weight, size, lanes: ((size + 2) ** 2 * weight.shape[1] * _whole(weight.shape[0], lanes), torch.float32))
def pack_winograd(weight: Tensor, size: int, lanes: int) -> Tensor:
    """Transform a weight [O, C, 3, 3] for tiles of size x size; pack it as flat [points][panels][C][width]."""
    points = _filter_points(size)
    transformed = torch.einsum("ik,ockl,jl->ijco", points, weight.detach().double(), points).float()
    return torch.cat([pack_columns(matrix, lanes) for matrix in transformed.flatten(0, 1)])


@_packs(lambda values, lanes: (_whole(values.numel(), lanes), torch.float32))
def pack_row(values: Tensor, lanes: int) -> Tensor:
    """Pack a parameter of a layer norm, flat and padded with zeros to whole vectors."""
    packed = torch.zeros(-(-values.numel() // lanes) * lanes, dtype=torch.float32)
    packed[: values.numel()] = values.detach().float().reshape(-1)
    return packed


@_packs(lambda table: (table.numel(), torch.float32))
def pack_table(table: Tensor) -> Tensor:
    """Return a table of embeddings as contiguous float32; the tensor's own memory if it is that."""
    return table.detach().float().contiguous()


def _words(matrix: Tensor, words: int) -> Tensor:
    """Lay out int8 values [..., LANES, 4] as the exact sums read them (mlsys/dot.h); flat bytes."""
    if words == 1:
        return matrix.contiguous().reshape(-1)
    pairs: Tensor = matrix[..., [0, 2, 1, 3]].to(torch.int16).reshape(*matrix.shape[:-1], words, 2)
    return pairs.transpose(-2, -3).contiguous().reshape(-1).view(torch.int8)


def _integers_size(weight: Tensor, groups: int, lanes: int, words: int, run: int) -> tuple[int, torch.dtype]:
    terms = prod(weight.shape[1:]) // run * _whole(run, 4)
    return groups * _whole(weight.shape[0] // groups, lanes) * terms * words, torch.int8


@_packs(_integers_size)
def pack_integers(weight: Tensor, groups: int, lanes: int, words: int, run: int) -> Tensor:
    """Pack int8 [O, C/groups, *kernel] as flat [groups][panels][K / 4][vectors][words][lanes]; panels of 2 vectors.

    Each run of ``run`` terms, of which channels are the closest, ends with a whole word.
    """
    rows = weight.detach().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).transpose(2, 3).flatten(2)
    columns, terms = rows.shape[1:]
    padded = torch.zeros(groups, _whole(columns, lanes), terms // run, _whole(run, 4), dtype=torch.int8)
    padded[:, :columns, :, :run] = rows.reshape(groups, columns, -1, run)
    made = []
    for group in padded.flatten(2):
        quads = [panel.reshape(-1, lanes, panel.shape[1] // 4, 4) for panel in torch.split(group, 2 * lanes)]
        made += [_words(each.permute(2, 0, 1, 3), words) for each in quads]
    return torch.cat(made)


def _pairs_size(weight: Tensor, groups: int, lanes: int) -> tuple[int, torch.dtype]:
    return groups * _whole(weight.shape[0] // groups, lanes) * _whole(prod(weight.shape[1:]), 2), torch.bfloat16


@_packs(_pairs_size)
def pack_pairs(weight: Tensor, groups: int, lanes: int) -> Tensor:
    """Pack a weight [O, C/groups, *kernel] in bf16, [groups][panels][K / 2][vectors][lanes][2]; panels of 2 vectors."""
    rows = weight.detach().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).transpose(2, 3).flatten(2)
    columns, terms = rows.shape[1:]
    padded = torch.zeros(groups, _whole(columns, lanes), _whole(terms, 2), dtype=torch.bfloat16)
    padded[:, :columns, :terms] = rows
    made = []
    for group in padded:
        pairs = [panel.reshape(-1, lanes, panel.shape[1] // 2, 2) for panel in torch.split(group, 2 * lanes)]
        made += [each.permute(2, 0, 1, 3).reshape(-1) for each in pairs]
    packed = torch.cat(made)
    shared = _SHARED.get()
    return packed if shared is None else shared.pages.place(packed)


def _in_quads(values: Tensor, lanes: int) -> Tensor:
    """Order channels [C, ...] as [blocks, 4, lanes, ...]: channel 16 l + 4 i + j is lane 4 l + j of vector i."""
    block = 4 * lanes
    padded = values.new_zeros(_whole(values.shape[0], block), *values.shape[1:])
    padded[: values.shape[0]] = values
    return padded.reshape(-1, lanes // 4, 4, 4, *values.shape[1:]).transpose(1, 2).flatten(2, 3)


def _depthwise_size(weight: Tensor, lanes: int, words: int) -> tuple[int, torch.dtype]:
    rows = -(-weight.shape[2] // 4) * 4
    return _whole(weight.shape[0], 4 * lanes) * rows * weight.shape[3] * words, torch.int8


@_packs(_depthwise_size)
def pack_integer_depthwise(weight: Tensor, lanes: int, words: int) -> Tensor:
    """Pack int8 values [C, 1, H, W] as flat [blocks][H / 4][W][4][words][lanes]."""
    channels, _, height, width = weight.shape
    padded = torch.zeros(channels, -(-height // 4) * 4, width, dtype=torch.int8)
    padded[:, :height] = weight.detach()[:, 0]
    blocks = _in_quads(padded, lanes).reshape(-1, 4, lanes, padded.shape[1] // 4, 4, width)
    return _words(blocks.permute(0, 3, 5, 1, 2, 4), words)


@_packs(lambda values, lanes: (_whole(values.numel(), 4 * lanes), values.dtype))
def pack_quads(values: Tensor, lanes: int) -> Tensor:
    """Pack a value of each channel as flat [blocks][4][lanes]."""
    return _in_quads(values.detach(), lanes).reshape(-1).contiguous()


@_packs(lambda values, groups, lanes: (groups * _whole(values.numel() // groups, lanes), values.dtype))
def pack_values(values: Tensor, groups: int, lanes: int) -> Tensor:
    """Pack a value of each output channel as [groups][channels, padded with zeros to whole vectors]."""
    columns = values.numel() // groups
    padded = torch.zeros(groups, _whole(columns, lanes), dtype=values.dtype)
    padded[:, :columns] = values.detach().reshape(groups, columns)
    return padded
