"""The state pool of one device: a tensor for each bank of the layout, and the rows requests have in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from mlsys_batchmaker.cells.cell import torch_dtype
from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.scheduling.requests import Constants
from mlsys_core.errors import InvalidInputError
from torch import Tensor

DEFAULT_POOL_BYTES = 512 << 20
_MAX_ROWS = 1 << 20
_MIN_ROWS = 64
_LINE = 64  # bytes: of a line of the caches, and of a vector


def plan_rows(layout: Layout, pool_bytes: int = DEFAULT_POOL_BYTES) -> list[int]:
    """Return rows of each bank such that all together take at most ``pool_bytes``.

    Banks have equal shares, narrow ones up to a bound.

    Raises:
        InvalidInputError: that is too little for 64 rows each.
    """
    rows = []
    share = pool_bytes // len(layout.banks)
    for dtype, shape in layout.banks:
        row_bytes = torch_dtype(dtype).itemsize * row_stride(shape, dtype)
        rows.append(min(_MAX_ROWS, share // row_bytes))
        if rows[-1] < _MIN_ROWS:
            raise InvalidInputError(
                f"a state pool of {pool_bytes:,} bytes has room for {rows[-1]} rows of {dtype}{list(shape)}, and needs "
                f"{_MIN_ROWS}: give it more"
            )
    return rows


class StatePool:
    """Rows of values on one device. Rows of different requests are apart, so several threads may use it at once.

    Args:
        layout: layout of the model.
        num_rows: rows of each bank; memory is taken up as rows are first written.
        device: device that holds the rows.
    """

    def __init__(self, layout: Layout, num_rows: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        on_host = self.device.type == "cpu"
        self.banks = [
            host_rows(rows, shape, dtype)
            if on_host
            else torch.zeros(rows, *shape, dtype=torch_dtype(dtype), device=self.device)
            for (dtype, shape), rows in zip(layout.banks, num_rows, strict=True)
        ]
        self._views = [bank.numpy() if on_host else None for bank in self.banks]  # as arrays; None: on a GPU

    def load(self, starts: Sequence[int], constants: Constants) -> None:
        """Write a request's constants, bank by bank from the starts of its blocks on."""
        for bank, view, start, arrays in zip(self.banks, self._views, starts, constants, strict=True):
            at = start
            for array in arrays:
                if view is not None:
                    view[at : at + len(array)] = array
                else:
                    bank[at : at + len(array)] = torch.tensor(array)
                at += len(array)

    def gather(self, bank: int, rows: Tensor) -> Tensor:
        """Return a copy of those rows, [len(rows), *shape]."""
        return self.banks[bank].index_select(0, rows)

    def scatter(self, bank: int, rows: Tensor, values: Tensor) -> None:
        """Write ``values`` to those rows."""
        self.banks[bank].index_copy_(0, rows, values)


class AllPools:
    """A store that writes constants to the pools of all devices."""

    def __init__(self, pools: Sequence[StatePool]) -> None:
        self._pools = pools

    def load(self, starts: Sequence[int], constants: Constants) -> None:
        """See :class:`StatePool`."""
        for pool in self._pools:
            pool.load(starts, constants)


def host_rows(count: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Make rows of zeros on the host, [count, *shape], for loops that read rows where they lie.

    The system makes them page by page, when a row is first written: half a gigabyte would take 0.3 s. Rows of a whole
    kilobyte, or several, are a cache line farther apart: else those that are read together would all want the same few
    sets of the first cache.
    """
    size = max(1, math.prod(shape))
    stride = row_stride(shape, dtype)
    memory = np.zeros(count * stride * np.dtype(dtype).itemsize + _LINE, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE
    rows = memory[start : memory.size - _LINE + start].view(dtype).reshape(count, stride)[:, :size]
    return torch.from_numpy(rows).view(count, *shape)


def row_stride(shape: tuple[int, ...], dtype: str) -> int:
    """Return how many numbers lie from a row of :func:`host_rows` to the next."""
    size, itemsize = max(1, math.prod(shape)), np.dtype(dtype).itemsize
    return size + (0 if size * itemsize % 1024 else _LINE // itemsize)
