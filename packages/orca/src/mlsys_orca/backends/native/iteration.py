"""One iteration as the native program takes it: spans, block tables and sampled rows, any range of rows at a time.

Between :class:`~mlsys_orca.model.decoder.ForwardInputs`, which has the batch, and :mod:`.decoder`, which runs
the program over one range after another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import MemoryPlanError
from mlsys_core.memory.pages import advise_huge_pages
from mlsys_core.native import Struct, new
from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.library import PANEL, RUN
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.embedding import look_up
from mlsys_orca.model.kv_cache import SCALE_NBYTES, Empty, RecurrentStates
from mlsys_orca.model.weights.quantized import Matrix, QuantizedMatrix
from mlsys_orca.scheduling.batch import BlockCopy
from numpy.typing import NDArray
from torch import Tensor

_KINDS = {torch.float32: "floats", torch.float16: "fp16", torch.int8: "codes"}


class NativeKVCache:
    """Keys and values of all layers, block by block, in the order that native attention reads.

    Blocks stand in runs of 64, layer after layer in each: memory is taken as requests come, by all layers of a run and
    not of all blocks. A block's keys of one head stand feature after feature, its values token after token; where pairs
    of bf16 are multiplied, two features, and two tokens, stand side by side. In int8 a token's key, and its value, of
    each head has a scale in fp32, so that its largest magnitude is 127; the scales of a block stand behind it.

    Args:
        config: The model's shape.
        num_blocks: The scheduler's number of blocks.
        num_states: Slots for the states of a recurrent model's requests.
        dtype: fp32, bf16, fp16 or int8; it need not be the model's.
        empty: Makes a tensor of a shape and a dtype; None: as torch does.
    """

    block_size = PANEL

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        num_states: int = 1,
        dtype: torch.dtype,
        empty: Empty | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.dtype = dtype
        if dtype == torch.bfloat16:  # how the program reads it: kv_layout.h, CacheKind
            self.kind = "pairs" if library.load().orca_attends_in_pairs(config.head_dim) else "halves"
        else:
            self.kind = _KINDS[dtype]
        heads = (-(-num_blocks // RUN), config.num_kv_layers, RUN, config.num_kv_heads)
        empty = empty or _empty
        width = -(-config.head_dim // PANEL) * PANEL
        if dtype.is_floating_point:
            self.keys = empty((*heads, config.head_dim, PANEL), dtype)
            self.values = empty((*heads, PANEL, width), dtype)
        else:
            scales = PANEL * SCALE_NBYTES
            self.keys = empty((*heads, config.head_dim * PANEL + scales), dtype)
            self.values = empty((*heads, PANEL * width + scales), dtype)
        self.states = None
        if config.recurrent is not None:
            self.states = RecurrentStates(config.recurrent, num_states=num_states, empty=empty)
        for tensor in (self.keys, self.values):
            advise_huge_pages(tensor.data_ptr(), tensor.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks' keys and values; what the last run has beside them is never touched."""
        return (self.keys.nbytes + self.values.nbytes) * self.num_blocks // (len(self.keys) * RUN)

    def copy_blocks(self, block_copies: Sequence[BlockCopy]) -> None:
        """Copy blocks; see :meth:`mlsys_orca.model.kv_cache.KVCache.copy_blocks`."""
        if not block_copies:
            return
        sources, destinations = (torch.tensor(blocks) for blocks in zip(*block_copies, strict=True))
        for tensor in (self.keys, self.values):
            tensor[destinations // RUN, :, destinations % RUN] = tensor[sources // RUN, :, sources % RUN]


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def look_up_native(table: Matrix, ids: Tensor) -> Tensor:
    """Return rows of a table like :func:`~mlsys_orca.model.layers.look_up`; a table in codes takes one native call.

    Raises:
        IndexError: there is no such row.
    """
    if not isinstance(table, QuantizedMatrix):
        return look_up(table, ids)
    parts = {name: None if part is None else part.contiguous() for name, part in table.parts.items()}
    native = library.load()
    matrix = new(
        native.structs["Codes"],
        **{name: None if part is None else part.data_ptr() for name, part in parts.items()},
        rows=table.out_features,
        K=table.in_features,
        group_size=table.group_size,
        block_size=table.block_size or 0,
        bits=table.bits,
        has_halves=table.scales.dtype == torch.float16,
    )
    ids = ids.contiguous()
    found = torch.empty(len(ids), table.in_features)
    count = native.orca_look_up(byref(matrix), ids.data_ptr(), len(ids), found.data_ptr())
    if count < len(ids):
        raise IndexError(f"there is no token {ids[count]}: the embedding has {table.out_features} rows")
    return found


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
        factors = [
            (c_void_p * len(parts))(*(None if part is None else part.data_ptr() for part in each))
            for each in zip(*parts, strict=True)
        ]
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
