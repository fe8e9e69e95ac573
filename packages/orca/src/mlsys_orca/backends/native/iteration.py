"""One iteration as the native program takes it: spans, block tables and sampled rows, any range of rows at a time.

Between :class:`~mlsys_orca.model.decoder.ForwardInputs`, which has the batch, and :mod:`.decoder`, which runs
the program over one range after another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from mlsys_core.errors import MemoryPlanError
from mlsys_core.native import Struct, new
from mlsys_orca.backends.native.kv_cache import NativeKVCache
from mlsys_orca.backends.native.library import PANEL, address
from mlsys_orca.model.decoder import ForwardInputs
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Results:
    """Memory that a run fills for the sampled rows. Owner: the caller."""

    logits: Tensor  # fp32 [num_sampled, columns], rows apart by any stride; [num_sampled, 0]: not wanted
    largest: NDArray[np.int64] | None = None  # [num_sampled] where each row's largest logit is; None: not wanted
    peaks: NDArray[np.float32] | None = None  # [num_sampled] those logits; None: not wanted
    has_head: bool = True  # False: the plan ends with the states


class Iteration:
    """Arrays of one iteration, and the memory that it reads and fills.

    Args:
        inputs: The batch.
        states: fp32 [num_tokens, hidden_size], which the program changes.
        rotated: Cosines and sines of each rotary, each [num_tokens, rotary_dim].
        kv_cache: Keys, values and recurrent states.
        results: What is filled.

    Raises:
        MemoryPlanError: a request's block table is too short for its tokens.
    """

    def __init__(
        self,
        inputs: ForwardInputs,
        states: Tensor,
        rotated: Sequence[tuple[Tensor | None, Tensor | None]],
        kv_cache: NativeKVCache,
        results: Results,
    ) -> None:
        spans, tables = [], list[int]()
        for request in inputs.batch.requests:
            if len(request.block_table) * PANEL < request.context_len:
                raise MemoryPlanError(
                    f"{len(request.block_table)} K/V blocks of {PANEL} do not hold {request.context_len} tokens"
                )
            spans.append((request.start, request.stop, request.context_len, len(tables), request.state_slot))
            tables.extend(request.block_table)
        self.num_rows = inputs.batch.num_tokens
        self._states, self._rotated, self._kv_cache, self._results = states, rotated, kv_cache, results
        self._spans = np.array(spans, dtype=np.int32)  # [n, 5], as Span has them
        self._tables = np.array(tables, dtype=np.int32)  # one after another
        self._wanted = np.array(inputs.wanted if results.has_head else [], dtype=np.int32)  # ascending

    def batch(
        self, first: int, stop: int, native: Any, *, num_layers: int, seconds: NDArray[np.float64] | None
    ) -> tuple[Struct, list[Any]]:
        """Return rows ``first`` to ``stop`` for the program, and what must live as long; those before them have run.

        Args:
            first: The first row.
            stop: The row after the last.
            native: The library.
            num_layers: Layers that keep keys and values.
            seconds: Per operator, to be added to; None: not measured.
        """
        results, kv_cache = self._results, self._kv_cache
        own = self._spans[(self._spans[:, 0] < stop) & (self._spans[:, 1] > first)]
        own[:, 2] -= np.maximum(own[:, 1] - stop, 0)  # the context that the last of these rows sees
        own[:, :2] = own[:, :2].clip(first, stop) - first
        begin, end = np.searchsorted(self._wanted, [first, stop]).tolist()
        sampled = self._wanted[begin:end] - first
        parts = [[None if part is None else part[first:stop] for part in pair] for pair in self._rotated]
        factors = [(c_void_p * len(parts))(*map(address, each)) for each in zip(*parts, strict=True)]
        recurrent = None if kv_cache.states is None else kv_cache.states.floats
        batch = new(
            native.structs["Batch"],
            num_rows=stop - first,
            num_spans=len(own),
            num_sampled=len(sampled),
            spans=own.ctypes.data,
            block_tables=self._tables.ctypes.data,
            sampled=sampled.ctypes.data,
            cos=ctypes.addressof(factors[0]),
            sin=ctypes.addressof(factors[1]),
            states=self._states[first:stop].data_ptr(),
            logits=results.logits[begin:end].data_ptr() if results.logits.numel() else None,
            keys=kv_cache.keys.data_ptr(),
            values=kv_cache.values.data_ptr(),
            num_layers=num_layers,
            cache=kv_cache.kind,
            seconds=None if seconds is None else seconds.ctypes.data,
            largest=None if results.largest is None else results.largest[begin:end].ctypes.data,
            peaks=None if results.peaks is None else results.peaks[begin:end].ctypes.data,
            logits_stride=results.logits.stride(0),
            states_of_requests=None if recurrent is None else recurrent.data_ptr(),
            state_stride=0 if recurrent is None else recurrent.stride(0),
        )
        return batch, [own, sampled, parts, factors]
