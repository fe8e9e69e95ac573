"""Several parts of a model in one process, and in several, made one: branches summed, tables and heads side by side.

Under :mod:`.torch_shard`: a sliced model has as many parts as its sums have slices, and a rank runs those that it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn

from mlsys_orca.model.adapter_products import AdaptedLinear
from mlsys_orca.model.blocks import Decoder, RotatedBy, Step
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.encoder_decoder import DecoderStep
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.model.layers import Embedding, look_up
from mlsys_orca.model.slices import add_in_tree
from mlsys_orca.model.weights.quantized import Matrix
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import Reducer
from mlsys_orca.scheduling.batch import BlockCopy


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
    if isinstance(last, AdaptedLinear):
        last = last.base
    if last is None or last.bias is None:  # experts have none
        return None
    bias: Tensor = last.bias.float()
    last.bias = None
    return bias
