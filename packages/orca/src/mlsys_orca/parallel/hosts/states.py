"""States from stage to stage between hosts, over a group's :class:`~.tensors.TensorGroup`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mlsys_orca.parallel.hosts.tensors import STATES, Outbox, TensorGroup, empty


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
