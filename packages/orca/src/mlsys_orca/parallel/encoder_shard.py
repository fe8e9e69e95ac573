"""A part of an encoder for texts: a :class:`~mlsys_orca.parallel.shard.Shard` without keys and values.

To ranks and masters it is a model whose "logits" are the states of all tokens, so that all around it is a decoder's:
holders, groups, channels, messages. Heads, features and rows of the vocabulary are cut as a decoder's are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn

from mlsys_orca.backends.native.kv_cache import NativeKVCache
from mlsys_orca.backends.runner import intra_op_threads
from mlsys_orca.loading.encoder_files import EncoderFiles
from mlsys_orca.model.adapters import AdapterFiles
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.encoder import Encoder, spans_of
from mlsys_orca.model.encoder_family import EncoderConfig
from mlsys_orca.model.kv_cache import Empty, KVCache
from mlsys_orca.model.slices import num_slices
from mlsys_orca.model.weights.checkpoint import Layout
from mlsys_orca.model.weights.quantized import weights_nbytes
from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory
from mlsys_orca.parallel.cuts import sources
from mlsys_orca.parallel.joining import JoinedEmbedding, SummedBranch, join_embeddings, join_layers
from mlsys_orca.parallel.owners import check_reducer
from mlsys_orca.parallel.placement import Placement, shard_config
from mlsys_orca.parallel.reading import PartCheckpoint, PartReader
from mlsys_orca.parallel.shard import Reducer
from mlsys_orca.scheduling.batch import BlockCopy


@dataclass(frozen=True, slots=True)
class _Naming:
    """Names of an encoder's tensors: :class:`~mlsys_orca.parallel.cuts.Naming`."""

    stems: Mapping[Layout, Mapping[str, str]]
    transposed: frozenset[Layout] = frozenset()
    qkv_by_head: frozenset[Layout] = frozenset()


def config_of(config: EncoderConfig) -> ModelConfig:
    """Return an encoder's shape in a decoder's words, for whoever divides it."""
    return ModelConfig(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.attention_size // config.num_heads,
        max_positions=config.max_positions,
        norm_eps=config.norm_eps,
        relative_positions=config.relative_positions,
    )


class NoCache(KVCache):
    """Keys and values of a model that keeps none."""

    def __init__(self) -> None:
        self.num_blocks = self.block_size = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return 0

    def copy_blocks(self, block_copies: Sequence[BlockCopy]) -> None:
        """Do nothing."""


class EncoderShard:
    """One place's part of an encoder.

    Args:
        parts: Its parts: one for each slice that the place owns, or one of a model that is not sliced.
        whole: The whole encoder's shape.
        placement: The place.
        slices: Slices of all ranks; 1: the model is not sliced.
    """

    needs_logits = True

    def __init__(self, parts: Sequence[Encoder], whole: ModelConfig, placement: Placement, *, slices: int) -> None:
        self.whole, self.placement = whole, placement
        self.config = shard_config(whole, placement)
        self._encoder = parts[0]
        if slices > 1:
            for layers in zip(*(part.layers for part in parts), strict=True):
                join_layers(layers)
            if placement.is_first:
                joined: Any = join_embeddings([part.embedding for part in parts], whole, placement, slices=slices)
                self._encoder.embedding = joined
        self._num_threads = 1
        self._reducer: Reducer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of this part's weights."""
        return weights_nbytes(self._encoder)

    def new_kv_cache(self, *, num_blocks: int, dtype: str | None = None, empty: Empty | None = None) -> KVCache:
        """Return a cache of nothing."""
        return NoCache()

    def add_adapter(self, key: str, files: AdapterFiles) -> None:
        """Refuse; see :meth:`Shard.add_adapter`.

        Raises:
            InvalidInputError: always.
        """
        raise InvalidInputError("an encoder takes no adapters")

    def remove_adapter(self, key: str) -> None:
        """Do nothing: there is none."""

    def join(self, reducer: Reducer | None, *, num_threads: int) -> Self:
        """Return this part with sums through ``reducer``; see :meth:`Shard.join`."""
        check_reducer(reducer, self.placement)
        other = copy(self)
        other._reducer = reducer if self.placement.num_ranks > 1 else None
        other._num_threads = num_threads
        for module in self._encoder.modules():
            if isinstance(module, SummedBranch | JoinedEmbedding):
                module.reducer = other._reducer
        return other

    def run(
        self, inputs: ForwardInputs, states: Tensor | None, out: Tensor | None, kv_cache: KVCache | NativeKVCache
    ) -> None:
        """Run this part over one batch of texts; of the last stage ``out`` gets the states [num_tokens, hidden_size].

        All ranks of a stage have the same states: the first writes them. See :meth:`Shard.run`.
        """
        check_reducer(self._reducer, self.placement)
        encoder = self._encoder
        spans = spans_of([request.num_tokens for request in inputs.batch.requests])
        with torch.inference_mode(), intra_op_threads(self._num_threads):
            x: Tensor
            if states is None:
                x = encoder.first_norm(encoder.embedding(inputs.token_ids, inputs.positions))
            else:
                x = states
            for layer in encoder.layers:
                x = layer(x, spans)
            if self.placement.is_last:
                x = encoder.last_norm(x)
            if out is not None and (self.placement.rank == 0 or not self.placement.is_last):
                out.copy_(x)


def load_encoder_shard(
    files: EncoderFiles, placement: Placement, *, dtype: torch.dtype, slices: bool | None = None
) -> EncoderShard:
    """Load the part of an encoder at ``placement``; no more of its file is read.

    Args:
        files: The encoder without its weights.
        placement: The part's place.
        dtype: To compute in.
        slices: Sums have the shape that ranks can share; None: where there are several ranks.

    Raises:
        InvalidInputError: it does not divide so, or its weights are damaged.
    """
    whole = config_of(files.config)
    shard_config(whole, placement)
    number = num_slices(whole) if (placement.num_ranks > 1 if slices is None else slices) else 1
    own = max(1, number // placement.num_ranks)
    parts = []
    for rank in range(placement.rank * own, (placement.rank + 1) * own):
        place = replace(placement, rank=rank, num_ranks=number)
        parts.append(_load_part(files, whole, place, dtype))
    return EncoderShard(parts, whole, placement, slices=number)


def _load_part(files: EncoderFiles, whole: ModelConfig, place: Placement, dtype: torch.dtype) -> Encoder:
    config, own = files.config, shard_config(whole, place)
    checkpoint = SafetensorsDirectory(files.path)
    naming = _Naming({"huggingface": files.family.stems})
    found = sources(naming, whole, place, checkpoint.names, checkpoint.layout)
    part = replace(
        config,
        vocab_size=own.vocab_size,
        num_layers=own.num_layers,
        num_heads=own.num_heads,
        head_dim=own.head_dim,
        intermediate_size=own.intermediate_size,
        scores_pairs=False,
    )
    encoder = files.family.load(
        part,
        PartCheckpoint(checkpoint, found),
        dtype=dtype,
        device=torch.device("cpu"),
        read_by=partial(PartReader, placement=place),
    )
    if not place.is_first:
        encoder.first_norm = nn.Identity()
    return encoder
