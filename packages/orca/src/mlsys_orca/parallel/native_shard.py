"""A part of a model that runs as a native program; a :class:`~mlsys_orca.parallel.shard.Shard`."""

from __future__ import annotations

from copy import copy
from typing import Self

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.backends.native.iteration import NativeKVCache, Results, look_up_native
from mlsys_orca.backends.native.packing import Rows
from mlsys_orca.model.adapters import AdapterFiles
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import Empty, KVCache, kv_dtype_name
from mlsys_orca.model.slices import num_slices
from mlsys_orca.model.weights.quantized import Matrix, weights_nbytes
from mlsys_orca.parallel.joining import Owners, check_reducer, table_dtype
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError, Reducer


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
            slices=num_slices(whole),
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

    def add_adapter(self, key: str, files: AdapterFiles) -> None:
        """Refuse; see :meth:`Shard.add_adapter`.

        Raises:
            InvalidInputError: always: adapters' products are torch's.
        """
        raise InvalidInputError("this part takes no adapters: load it with takes_adapters")

    def remove_adapter(self, key: str) -> None:
        """Do nothing: there is none."""

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
