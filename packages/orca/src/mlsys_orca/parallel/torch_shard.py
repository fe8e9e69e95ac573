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

from mlsys_orca.backends.native.decoder import NativeKVCache
from mlsys_orca.model.blocks import Decoder, RotatedBy, Step
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel, ForwardInputs
from mlsys_orca.model.encoder import spans_of
from mlsys_orca.model.encoder_decoder import DecoderStep, EncoderDecoder, split
from mlsys_orca.model.kv_cache import DEFAULT_BLOCK_SIZE, Empty, KVCache
from mlsys_orca.model.layers import Embedding, look_up
from mlsys_orca.model.slices import add_in_tree
from mlsys_orca.model.weights.quantized import Matrix, weights_nbytes
from mlsys_orca.parallel.owners import Owners, check_reducer, table_dtype
from mlsys_orca.parallel.placement import Placement, num_encoder_layers
from mlsys_orca.parallel.shard import Reducer
from mlsys_orca.scheduling.batch import BlockCopy

_BRANCHES = ("attention", "cross_attention", "mlp")  # of a layer: each ends in a product whose features ranks share


class PartsKVCache(KVCache):
    """Keys and values of several parts, each in a cache of its own."""

    def __init__(self, parts: Sequence[KVCache]) -> None:
        self.parts = parts
        self.num_blocks, self.block_size = parts[0].num_blocks, parts[0].block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(part.nbytes for part in self.parts)

    def copy_blocks(self, block_copies: Sequence[BlockCopy]) -> None:
        """Copy blocks; see :meth:`KVCache.copy_blocks`."""
        for part in self.parts:
            part.copy_blocks(block_copies)


class SummedBranch(nn.Module):
    """One branch of a layer, of the parts that this rank has: their sum with that of the other ranks.

    Args:
        parts: Branches, each without the bias of its last product.
        bias: That bias; None: there is none.
    """

    def __init__(self, parts: Sequence[nn.Module], bias: Tensor | None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("bias", bias, persistent=False)
        self.reducer: Reducer | None = None  # set when the part joins its group

    def forward(self, x: Tensor, *step: Any) -> Tensor:
        """Run the branch on ``x`` [num_tokens, hidden_size] -> fp32 of the same shape."""
        sums: list[Tensor] = [part(x, *_steps_of(step, index)).float() for index, part in enumerate(self.parts)]
        total = add_in_tree(sums, torch.add)
        if self.reducer is not None:
            total = add_in_tree(self.reducer.exchange(total), torch.add)
        bias: Any = self.bias
        if bias is not None:
            total = total + bias
        return total


def _steps_of(step: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    """Return a layer's inputs beside the states, with the cache of part ``index``."""
    return tuple(
        replace(each, kv_cache=_part_of(each.kv_cache, index)) if isinstance(each, Step | DecoderStep) else each
        for each in step
    )


def _part_of(cache: KVCache, index: int) -> KVCache:
    assert isinstance(cache, PartsKVCache)
    return cache.parts[index]


class JoinedHead(nn.Module):
    """The vocabulary projections of several parts, beside each other."""

    def __init__(self, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` [num_sampled, hidden_size] -> [num_sampled, columns of all parts]."""
        return torch.cat([head(x) for head in self.heads], dim=-1)


class JoinedEmbedding(nn.Module):
    """The embedding, whose table's rows are in several parts and several ranks.

    Args:
        parts: This rank's embeddings, in the order of their rows.
        places: Rows of the whole table that each has.
        whole: The whole model's configuration.
        placement: This rank's place.
    """

    def __init__(
        self, parts: Sequence[Embedding], places: Sequence[range], whole: ModelConfig, placement: Placement
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._first = parts[0]
        self._tables: list[Matrix] = [part.table for part in parts]
        self._stops = torch.tensor([place.stop - places[0].start for place in places])
        self._whole, self._placement = whole, placement
        self.reducer: Reducer | None = None

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Embed ``token_ids`` at ``positions``, both [num_tokens] int64 -> fp32 [num_tokens, hidden_size]."""
        found: Tensor = self._first(token_ids, positions, self._rows_of)
        return found

    def _rows_of(self, table: Matrix, ids: Tensor) -> Tensor:
        if self.reducer is None:
            return self._own_rows(ids)
        return Owners(self._placement, self._whole, self.reducer).rows(ids, self._own_rows, table_dtype(table))

    def _own_rows(self, ids: Tensor) -> Tensor:
        which = torch.bucketize(ids, self._stops, right=True)
        starts = [0, *self._stops.tolist()]
        first = self._tables[0]
        out = torch.empty(len(ids), first.shape[1], dtype=table_dtype(first))
        for index, table in enumerate(self._tables):
            out[which == index] = look_up(table, ids[which == index] - starts[index])
        return out


def join_parts(parts: Sequence[Decoder], whole: ModelConfig, placement: Placement, *, slices: int) -> Decoder:
    """Return one decoder of several parts, which lose their layers to it.

    Args:
        parts: Decoders of equal shape, one for each slice that this rank owns, in order.
        whole: The whole model's configuration.
        placement: This rank's place.
        slices: Slices of all ranks.
    """
    joined = parts[0]
    for layers in zip(*(part.layers for part in parts), strict=True):
        join_layers(layers)
    joined.head = JoinedHead([part.head for part in parts])
    if placement.is_first:
        joined.embedding = join_embeddings([part.embedding for part in parts], whole, placement, slices=slices)
    return joined


def join_embeddings(
    parts: Sequence[nn.Module], whole: ModelConfig, placement: Placement, *, slices: int
) -> JoinedEmbedding:
    """Return one embedding of those of several parts; see :func:`join_parts`."""
    own = slices // placement.num_ranks
    places = [
        Placement(rank=placement.rank * own + index, num_ranks=slices).vocabulary(whole) for index in range(len(parts))
    ]
    return JoinedEmbedding([part for part in parts if isinstance(part, Embedding)], places, whole, placement)


def join_layers(layers: Sequence[nn.Module]) -> None:
    """Let the first of some layers have the branches of all."""
    for name in _BRANCHES:
        if hasattr(layers[0], name):
            branches: list[Any] = [getattr(layer, name) for layer in layers]
            biases = [_take_bias(branch) for branch in branches]  # all alike
            setattr(layers[0], name, SummedBranch(branches, biases[0]))


def _take_bias(branch: nn.Module) -> Tensor | None:
    """Take the bias of a branch's last product, to be added once to the sum of all parts."""
    inner: Any = branch.attention if isinstance(branch, RotatedBy) else branch
    last: Any = getattr(inner, "output", None) or getattr(inner, "down", None)
    if last is None or last.bias is None:  # experts have none
        return None
    bias: Tensor = last.bias.float()
    last.bias = None
    return bias


class TorchShard:
    """One place's part of a model in torch's operators.

    Args:
        parts: The model's parts that this place has: one for each slice that it owns, or one of a model that is not
            sliced.
        whole: The whole model's configuration.
        config: This place's.
        placement: The place.
        slices: Slices of all ranks; 1: the model is not sliced.
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

    def new_kv_cache(self, *, num_blocks: int, empty: Empty | None = None) -> KVCache:
        """Make an empty cache; see :meth:`Shard.new_kv_cache`."""
        caches = [
            KVCache(config, num_blocks=num_blocks, block_size=DEFAULT_BLOCK_SIZE, dtype=self.dtype, empty=empty)
            for config in self._part_configs
        ]
        return PartsKVCache(caches) if self._is_sliced else caches[0]

    def join(self, reducer: Reducer | None, *, num_threads: int) -> Self:
        """Return this part with sums through ``reducer``; see :meth:`Shard.join`.

        torch's number of threads belongs to the process, whose owner sets it to ``num_threads``
        (:func:`~mlsys_orca.backends.runner.intra_op_threads`). A part joins one group in a process: the modules are
        shared.
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
        with torch.inference_mode():
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
                encoded = encoder.first_norm(encoder.embedding(inputs.token_ids[reads], inputs.positions[reads]))
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
        step = DecoderStep(
            own_slots=torch.tensor(sides.decoder_slots, dtype=torch.int64),
            own_spans=sides.own_spans,
            cross_slots=torch.tensor(sides.encoder_slots, dtype=torch.int64),
            cross_spans=sides.cross_spans,
            encoded=None if encoded is None else encoded.to(self.dtype),
            kv_cache=kv_cache,
        )
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
