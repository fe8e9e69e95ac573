"""Rows of an embedding's table that the ranks of a stage have between them, and the check that they can meet."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.weights.quantized import Matrix
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import Reducer


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
