"""A part of a model in torch's operators; a :class:`~mlsys_orca.parallel.shard.Shard`.

torch chooses its loops by the shapes of a product, so equal bits need equal shapes, whatever the number of ranks. A
sliced model is therefore always built of as many parts as its sums have slices (:mod:`mlsys_orca.model.slices`), each
with its own heads, features, rows of the vocabulary and keys and values; a rank runs those that it owns, one after
the other, and adds what they give in the one tree. A model that is not sliced has one part, as outside of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn

from mlsys_orca.backends.native.iteration import NativeKVCache
from mlsys_orca.backends.runner import intra_op_threads
from mlsys_orca.model.adapter_products import AdapterPlace
from mlsys_orca.model.adapters import AdaptedDecoder, AdapterFiles
from mlsys_orca.model.blocks import Decoder, Step
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel, ForwardInputs
from mlsys_orca.model.encoder_decoder import EncoderDecoder, spans_of, split
from mlsys_orca.model.families import model_family
from mlsys_orca.model.kv_cache import DEFAULT_BLOCK_SIZE, Empty, KVCache, kv_dtype_name
from mlsys_orca.model.weights.checkpoint import Cut
from mlsys_orca.model.weights.quantized import weights_nbytes
from mlsys_orca.parallel.joining import (
    JoinedEmbedding,
    PartsKVCache,
    SummedBranch,
    check_reducer,
    join_layers,
    join_parts,
)
from mlsys_orca.parallel.placement import Placement, num_encoder_layers
from mlsys_orca.parallel.reading import cut_of
from mlsys_orca.parallel.shard import Reducer


def _adapted(
    parts: Sequence[DecoderModel], whole: ModelConfig, placement: Placement, slices: int
) -> list[AdaptedDecoder]:
    """Make the products of each part take adapters, of which each has its own rows or columns."""
    by_head = "huggingface" in model_family(whole.architecture).qkv_by_head
    own = placement.layers(whole)

    def place_of(number: int) -> AdapterPlace:
        there = replace(placement, rank=placement.rank * len(parts) + number, num_ranks=slices)

        def cut(role: str) -> Cut | None:
            return cut_of(role, "weight", whole, there, is_transposed=False, by_head=by_head)

        return AdapterPlace(own.start, whole.num_layers, slices, cut)

    return [AdaptedDecoder(part, {}, place=place_of(number)) for number, part in enumerate(parts)]


class TorchShard:
    """One place's part of a model in torch's operators.

    Args:
        parts: The model's parts that this place has: one for each slice that it owns, or one of a model that is not
            sliced.
        whole: The whole model's configuration.
        config: This place's.
        placement: The place.
        slices: Slices of all ranks; 1: the model is not sliced.
        takes_adapters: Adapters may be added.

    Raises:
        InvalidInputError: the model cannot be divided, or is of no kind that takes adapters.
    """

    needs_logits = False

    def __init__(
        self,
        parts: Sequence[DecoderModel],
        whole: ModelConfig,
        config: ModelConfig,
        placement: Placement,
        *,
        slices: int,
        takes_adapters: bool = False,
    ) -> None:
        self.config, self.whole, self.placement = config, whole, placement
        self.dtype, self.device = parts[0].dtype, parts[0].device
        self._part_configs = [part.config for part in parts]
        self._is_sliced = slices > 1
        self._encoder: Any = None
        decoders: list[Decoder] = []
        for part in parts:
            if isinstance(part, EncoderDecoder):
                decoders.append(part.decoder)
            elif isinstance(part, Decoder):
                decoders.append(part)
            else:
                raise InvalidInputError(f"a {type(part).__name__} cannot be divided")
        if isinstance(parts[0], EncoderDecoder):
            self._encoder = parts[0].encoder
        self._adapted = _adapted(parts, whole, placement, slices) if takes_adapters else []
        if self._is_sliced:
            encoders: list[Any] = [part.encoder for part in parts if isinstance(part, EncoderDecoder)]
            for layers in zip(*(encoder.layers for encoder in encoders), strict=True):
                join_layers(layers)
            join_parts(decoders, whole, placement, slices=slices)
            if encoders:
                encoders[0].embedding = decoders[0].embedding
        self._decoder = decoders[0]
        if not placement.is_first:
            self._decoder.embedding.table = torch.empty(0)  # of a tied head, which keeps it
        self._num_threads = 1
        self._reducer: Reducer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of this part's weights."""
        return weights_nbytes(nn.ModuleList(filter(None, (self._encoder, self._decoder))))

    def new_kv_cache(self, *, num_blocks: int, dtype: str | None = None, empty: Empty | None = None) -> KVCache:
        """Make an empty cache; see :meth:`Shard.new_kv_cache`."""
        kv_dtype_name(dtype, self.dtype, is_native=False)
        caches = [
            KVCache(config, num_blocks=num_blocks, block_size=DEFAULT_BLOCK_SIZE, dtype=self.dtype, empty=empty)
            for config in self._part_configs
        ]
        return PartsKVCache(caches) if self._is_sliced else caches[0]

    @property
    def adapters(self) -> frozenset[str]:
        """Keys that requests may give."""
        return self._adapted[0].adapters if self._adapted else frozenset()

    def add_adapter(self, key: str, files: AdapterFiles) -> None:
        """Add this place's part of an adapter; from any thread. A key that is there stays as it is.

        Raises:
            InvalidInputError: it does not fit the model, is damaged, or this part was loaded without adapters.
        """
        if not self._adapted:
            raise InvalidInputError("this part takes no adapters: load it with takes_adapters")
        for part in self._adapted:
            part.add(key, files)

    def remove_adapter(self, key: str) -> None:
        """Forget an adapter that no request uses any more; from any thread."""
        for part in self._adapted:
            part.remove(key)

    def join(self, reducer: Reducer | None, *, num_threads: int) -> Self:
        """Return this part with sums through ``reducer``; see :meth:`Shard.join`.

        torch's number of threads is ``num_threads`` while a run lasts. A part joins one group in a process: the modules
        are shared.
        """
        check_reducer(reducer, self.placement)
        other = copy(self)
        other._reducer = reducer if self.placement.num_ranks > 1 else None
        other._num_threads = num_threads
        for root in filter(None, (self._encoder, self._decoder)):
            for module in root.modules():
                if isinstance(module, SummedBranch | JoinedEmbedding):
                    module.reducer = other._reducer
        return other

    def run(
        self, inputs: ForwardInputs, states: Tensor | None, out: Tensor | None, kv_cache: KVCache | NativeKVCache
    ) -> None:
        """Run this part over one iteration; see :meth:`Shard.run`."""
        if isinstance(kv_cache, NativeKVCache):
            raise InvalidInputError("a part in torch's operators keeps its keys and values in a KVCache")
        check_reducer(self._reducer, self.placement)
        run: Callable[[ForwardInputs, Tensor | None, KVCache], Tensor] = (
            self._run_decoder if self._encoder is None else self._run_both
        )
        for part in self._adapted:
            part.begin(inputs)
        with torch.inference_mode(), intra_op_threads(self._num_threads):
            found = run(inputs, states, kv_cache)
            if out is not None:
                self._hand_over(inputs, found, out)

    def _run_decoder(self, inputs: ForwardInputs, states: Tensor | None, kv_cache: KVCache) -> Tensor:
        decoder = self._decoder
        step = Step(inputs, kv_cache, decoder.rotary(inputs.positions) if decoder.rotary is not None else None)
        x: Tensor = decoder.embedding(inputs.token_ids, inputs.positions) if states is None else states
        return self._through_decoder(x, step, inputs.sampled_rows)

    def _run_both(self, inputs: ForwardInputs, states: Tensor | None, kv_cache: KVCache) -> Tensor:
        """Run encoder rows and decoder rows, each through the layers of its side that this stage has."""
        sides = split(inputs)
        own, encoder, decoder = self.placement.encoder_layers(self.whole), self._encoder, self._decoder
        reads, writes = (torch.tensor(rows, dtype=torch.int64) for rows in (sides.encoder_rows, sides.decoder_rows))
        encoded: Tensor | None = None
        if len(reads):
            if states is None:
                encoded = encoder.embedding(inputs.token_ids[reads], inputs.positions[reads])
            else:
                encoded = states[reads]
            for layer in encoder.layers:
                encoded = layer(encoded, spans_of(sides.encoder_lengths))
            if len(own) and own.stop == num_encoder_layers(self.whole):
                encoded = encoder.last_norm(encoded)
        assert encoded is None or isinstance(encoded, Tensor)
        if states is None:
            positions = torch.tensor(sides.decoder_positions, dtype=torch.int64)
            x: Tensor = decoder.embedding(inputs.token_ids[writes], positions)
        else:
            x = states[writes]
        step = sides.step(None if encoded is None else encoded.to(self.dtype), kv_cache, self.device)
        found = self._through_decoder(x, step, torch.tensor(sides.sampled, dtype=torch.int64))
        if self.placement.is_last:
            return found
        both = torch.empty(inputs.batch.num_tokens, self.whole.hidden_size)
        both[writes] = found
        if encoded is not None:
            both[reads] = encoded.float()
        return both

    def _through_decoder(self, x: Tensor, step: Any, sampled_rows: Tensor) -> Tensor:
        """Return the states, or of the last stage this rank's logits [num_sampled, own columns]."""
        for layer in self._decoder.layers:
            x = layer(x, step)
        if not self.placement.is_last:
            return x
        if not len(sampled_rows):
            return x.new_empty((0, len(self.placement.vocabulary(self.whole))))
        return self._decoder.logits(self._decoder.norm(x[sampled_rows]))

    def _hand_over(self, inputs: ForwardInputs, found: Tensor, out: Tensor) -> None:
        if not self.placement.is_last:
            out.copy_(found)
            return
        own = self.placement.vocabulary(self.whole)
        if inputs.needs_logits:
            out[:, own.start : own.stop] = found
            return
        if len(found):
            largest = torch.from_numpy(found.numpy().argmax(-1))  # the first of equals, as the sampler takes
            out[:, 0] = found.gather(1, largest[:, None])[:, 0]
            out[:, 1] = largest + own.start
