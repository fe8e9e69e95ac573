"""Ends of a group's tensors as ranks and master have them: states from stage to stage, results to the master."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlsys_ray.tensors import RESULTS, STATES, Outbox, TensorGroup, empty


class DistributedOut:
    """Stage's way to the next one: :class:`~mlsys_orca.parallel.channels.StatesOut`.

    Args:
        group: The tensors' way.
        hidden_size: Of the model.
        depth: Iterations in flight at most.
        receivers: Numbers of the next stage's ranks in the group.
    """

    def __init__(self, group: TensorGroup, *, hidden_size: int, depth: int, receivers: Sequence[int]) -> None:
        self._hidden_size, self._receivers = hidden_size, list(receivers)
        self._outbox = Outbox(group, STATES, depth=depth)
        self._rooms: dict[int, Tensor] = {}  # by iteration, until it is sent

    def room(self, number: int, num_tokens: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.StatesOut`."""
        room = self._rooms[number] = empty(num_tokens, self._hidden_size)
        return room

    def send(self, number: int) -> None:
        """See :class:`~mlsys_orca.parallel.channels.StatesOut`.

        Raises:
            GroupBrokenError: the next stage is gone.
        """
        self._outbox.send(self._rooms.pop(number), self._receivers)


class DistributedIn:
    """One rank's way from the stage before: :class:`~mlsys_orca.parallel.channels.StatesIn`.

    Args:
        group: The tensors' way.
        hidden_size: Of the model.
        sender: Number of the stage's controller in the group.
    """

    def __init__(self, group: TensorGroup, *, hidden_size: int, sender: int) -> None:
        self._group, self._hidden_size, self._sender = group, hidden_size, sender

    def receive(self, number: int, num_tokens: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.StatesIn`."""
        states = empty(num_tokens, self._hidden_size)
        self._group.receive(states, self._sender, STATES)
        return states


def columns_of(rank: int, num_ranks: int, vocab_size: int) -> range:
    """Return the columns of the logits that a rank has, as ``Placement.vocabulary`` does."""
    return range(vocab_size * rank // num_ranks, vocab_size * (rank + 1) // num_ranks)


class DistributedResultsOut:
    """One rank's way to the master: :class:`~mlsys_orca.parallel.channels.ResultsOut`.

    Args:
        group: The tensors' way.
        columns: Of the logits that are the rank's.
        vocab_size: Of the whole model.
        depth: Iterations in flight at most.
    """

    def __init__(self, group: TensorGroup, *, columns: range, vocab_size: int, depth: int) -> None:
        self._columns, self._vocab_size = columns, vocab_size
        self._outbox = Outbox(group, RESULTS, depth=depth)
        self._rooms: dict[int, Tensor] = {}  # by iteration, until it is sent

    def logits(self, number: int, num_rows: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.ResultsOut`."""
        room = empty(num_rows, self._vocab_size)
        self._rooms[number] = room[:, self._columns.start : self._columns.stop]
        return room

    def peaks(self, number: int, num_rows: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.ResultsOut`."""
        room = self._rooms[number] = empty(num_rows, 2, torch.float64)
        return room

    def send(self, number: int) -> None:
        """See :class:`~mlsys_orca.parallel.channels.ResultsOut`."""
        room = self._rooms.pop(number)
        if room.numel():
            self._outbox.send(room.contiguous(), [0])


class DistributedResultsIn:
    """Master's side: :class:`~mlsys_orca.parallel.channels.ResultsIn`.

    Args:
        group: The tensors' way.
        ranks: Numbers of the last stage's ranks in the group, by rank.
        vocab_size: Of the whole model.
    """

    def __init__(self, group: TensorGroup, *, ranks: range, vocab_size: int) -> None:
        self._group, self._ranks, self._vocab_size = group, ranks, vocab_size

    def logits(self, number: int, num_rows: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.ResultsIn`.

        Raises:
            GroupBrokenError: a rank is gone.
        """
        found = empty(num_rows, self._vocab_size)
        for rank, sender in enumerate(self._ranks):
            own = columns_of(rank, len(self._ranks), self._vocab_size)
            part = empty(num_rows, len(own))
            if part.numel():
                self._group.receive(part, sender, RESULTS)
                found[:, own.start : own.stop] = part
        return found

    def peaks(self, number: int, num_rows: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.ResultsIn`.

        Raises:
            GroupBrokenError: a rank is gone.
        """
        found = torch.empty(len(self._ranks), num_rows, 2, dtype=torch.float64)
        for part, sender in zip(found, self._ranks, strict=True):
            if part.numel():
                self._group.receive(part, sender, RESULTS)
        return found
