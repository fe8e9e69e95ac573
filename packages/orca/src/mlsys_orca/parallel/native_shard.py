"""A part of a model that runs as a native program; a :class:`~mlsys_orca.parallel.shard.Shard`."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Self

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.backends.native.iteration import NativeKVCache, Results, look_up_native
from mlsys_orca.backends.native.packing import Rows
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import Empty, KVCache, kv_dtype_name
from mlsys_orca.model.slices import num_slices
from mlsys_orca.model.weights.quantized import Matrix, weights_nbytes
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError, Reducer


class Owners:
    """Rows of an embedding's table that ranks have between them."""

    def __init__(self, placement: Placement, whole: ModelConfig, reducer: Reducer | None) -> None:
        places = (
            Placement(rank=rank, num_ranks=placement.num_ranks).vocabulary(whole) for rank in range(placement.num_ranks)
        )
        self._stops = torch.tensor([place.stop for place in places])
        self._own, self._reducer = placement.vocabulary(whole), reducer
        self._vocab_size = whole.vocab_size

    def rows(self, ids: Tensor, look_up: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """Return the rows ``ids`` of the whole table, of ``dtype``.

        Args:
            ids: [num_tokens] int64.
            look_up: Gives rows of this rank's part of the table, by numbers within it.
            dtype: The table's.

        Raises:
            IndexError: there is no such row.
        """
        assert self._reducer is not None
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size):
            raise IndexError(f"token ids are from 0 to {self._vocab_size - 1}")
        is_own = (ids >= self._own.start) & (ids < self._own.stop)
        own = look_up((ids - self._own.start)[is_own])
        mine = torch.zeros(len(ids), own.shape[1])
        mine[is_own] = own.float()
        found = self._reducer.exchange(mine)
        owner = torch.bucketize(ids, self._stops, right=True)
        for rank, theirs in enumerate(found):
            if rank != self._reducer.rank:
                mine[owner == rank] = theirs[owner == rank]
        return mine.to(dtype)


def table_dtype(table: Matrix) -> torch.dtype:
    """Return the dtype of rows that are looked up in ``table``."""
    return table.dtype if isinstance(table, Tensor) else torch.float32


def check_reducer(reducer: Reducer | None, placement: Placement) -> None:
    """See that the part has the reducer that it needs.

    Raises:
        InvalidInputError: it has none, or another rank's.
    """
    if placement.num_ranks == 1:
        return
    if reducer is None:
        raise InvalidInputError(
            f"rank {placement.rank} of {placement.num_ranks} cannot run alone: join it to a reducer"
        )
    if (reducer.rank, reducer.num_ranks) != (placement.rank, placement.num_ranks):
        raise InvalidInputError(
            f"the reducer is of rank {reducer.rank} of {reducer.num_ranks}, the part of rank {placement.rank} of "
            f"{placement.num_ranks}"
        )


class NativeShard:
    """One place's part of a decoder as a native program.

    Args:
        decoder: The part, in torch's modules; gives its weights away.
        whole: The whole model's configuration.
        placement: The part's place.
        activations: As of :class:`NativeDecoder`.

    Raises:
        LoweringError: the decoder has a part without a native operator.
        MissingDependencyError: there is no C++ compiler.
    """

    def __init__(
        self, decoder: Decoder, whole: ModelConfig, placement: Placement, *, activations: Rows = "float"
    ) -> None:
        self.config, self.whole, self.placement = decoder.config, whole, placement
        self.dtype = decoder.dtype
        self.device = decoder.device
        self._decoder = NativeDecoder(
            decoder,
            activations=activations,
            slices=num_slices(whole, placement.num_ranks),
            num_ranks=placement.num_ranks,
            has_head=placement.is_last,
        )
        self.needs_logits = whole.logit_softcap is not None
        self._reducer: Reducer | None = None
        if not placement.is_first:
            self._decoder.embedding.table = torch.empty(0)  # of a tied head, which has it packed

    @property
    def nbytes(self) -> int:
        """Bytes of this part's weights."""
        return self._decoder.nbytes + weights_nbytes(self._decoder.embedding)

    def new_kv_cache(self, *, num_blocks: int, dtype: str | None = None, empty: Empty | None = None) -> NativeKVCache:
        """Make an empty cache; see :meth:`Shard.new_kv_cache`."""
        kept_in = getattr(torch, kv_dtype_name(dtype, self.dtype, is_native=True))
        return NativeKVCache(self.config, num_blocks=num_blocks, dtype=kept_in, empty=empty)

    def join(self, reducer: Reducer | None, *, num_threads: int) -> Self:
        """Return this part with threads of its own; see :meth:`Shard.join`."""
        check_reducer(reducer, self.placement)
        other = copy(self)
        other._reducer = reducer
        meeting = None if self.placement.num_ranks == 1 or reducer is None else reducer.address
        other._decoder = self._decoder.with_threads(num_threads, meeting=meeting)
        return other

    def run(
        self, inputs: ForwardInputs, states: Tensor | None, out: Tensor | None, kv_cache: KVCache | NativeKVCache
    ) -> None:
        """Run this part over one iteration; see :meth:`Shard.run`."""
        if not isinstance(kv_cache, NativeKVCache):
            raise InvalidInputError("a native part keeps its keys and values in a NativeKVCache")
        check_reducer(self._reducer, self.placement)
        with torch.inference_mode():
            here = self._embedded(inputs) if states is None else states.clone()
            if not self.placement.is_last:
                self._finish(inputs, here, kv_cache, Results(torch.empty(len(inputs.wanted), 0), has_head=False))
                if out is not None:
                    out.copy_(here)
            else:
                self._run_last(inputs, here, out, kv_cache)

    def _run_last(self, inputs: ForwardInputs, states: Tensor, out: Tensor | None, kv_cache: NativeKVCache) -> None:
        own, rows = self.placement.vocabulary(self.whole), len(inputs.wanted)
        if not (inputs.needs_logits or self.needs_logits):
            largest, peaks = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.float32)
            self._finish(inputs, states, kv_cache, Results(torch.empty(rows, 0), largest, peaks))
            if out is not None:
                out[:, 0] = torch.from_numpy(peaks)
                out[:, 1] = torch.from_numpy(largest + own.start)
            return
        cap = self.whole.logit_softcap
        is_direct = out is not None and cap is None  # else values are changed side by side, in rows of their own
        logits = out[:, own.start : own.stop] if is_direct and out is not None else torch.empty(rows, len(own))
        self._finish(inputs, states, kv_cache, Results(logits))
        if out is not None and cap is not None:
            out[:, own.start : own.stop] = (logits / cap).tanh_().mul_(cap)

    def _finish(self, inputs: ForwardInputs, states: Tensor, kv_cache: NativeKVCache, results: Results) -> None:
        if not self._decoder.run(inputs, states, kv_cache, results):
            raise GroupBrokenError("another rank of this stage is gone")

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        if self.placement.num_ranks == 1:
            rows_of = look_up_native
        else:
            owners = Owners(self.placement, self.whole, self._reducer)

            def rows_of(table: Matrix, ids: Tensor) -> Tensor:
                return owners.rows(ids, lambda own: look_up_native(table, own), table_dtype(table))

        found: Tensor = self._decoder.embedding(inputs.token_ids, inputs.positions, rows_of)
        return found.contiguous()
