"""States from stage to stage between hosts, over torch.distributed's default group (gloo on CPU).

A sender keeps a buffer for each iteration in flight, and does not wait for the receiver before that buffer comes again.
Who loses the other gets an error at once where its connection breaks, else when the group's timeout has passed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from mlsys_orca.parallel.shard import GroupBrokenError


class DistributedOut:
    """Stage's way to the next one: :class:`~mlsys_orca.parallel.channels.StatesOut`.

    Args:
        hidden_size: Of the model.
        depth: Iterations in flight at most.
        max_tokens: Tokens of an iteration at most.
        receivers: Numbers of the next stage's ranks in the group.
    """

    def __init__(self, *, hidden_size: int, depth: int, max_tokens: int, receivers: Sequence[int]) -> None:
        self._buffers = torch.empty(depth, max_tokens, hidden_size)
        self._num_tokens = [0] * depth
        self._sending: list[list[distributed.Work]] = [[] for _ in range(depth)]
        self._receivers = receivers

    def room(self, number: int, num_tokens: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.StatesOut`.

        Raises:
            GroupBrokenError: the iteration before in this buffer was not received.
        """
        slot = number % len(self._buffers)
        try:
            for work in self._sending[slot]:
                work.wait()
        except RuntimeError as error:
            raise GroupBrokenError(f"the next stage is gone: {error}") from error
        self._sending[slot], self._num_tokens[slot] = [], num_tokens
        return self._buffers[slot, :num_tokens]

    def send(self, number: int) -> None:
        """See :class:`~mlsys_orca.parallel.channels.StatesOut`.

        Raises:
            GroupBrokenError: the next stage is gone.
        """
        slot = number % len(self._buffers)
        states = self._buffers[slot, : self._num_tokens[slot]]
        try:
            for receiver in self._receivers:
                work = distributed.isend(states, receiver)
                assert work is not None  # this process is in the group
                self._sending[slot].append(work)
        except RuntimeError as error:
            raise GroupBrokenError(f"the next stage is gone: {error}") from error


class DistributedIn:
    """One rank's way from the stage before: :class:`~mlsys_orca.parallel.channels.StatesIn`.

    Args:
        hidden_size: Of the model.
        sender: Number of the stage's controller in the group.
    """

    def __init__(self, *, hidden_size: int, sender: int) -> None:
        self._hidden_size, self._sender = hidden_size, sender

    def receive(self, number: int, num_tokens: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.StatesIn`."""
        states = torch.empty(num_tokens, self._hidden_size)
        try:
            distributed.recv(states, self._sender)
        except RuntimeError as error:
            raise GroupBrokenError(f"the stage before this one is gone: {error}") from error
        return states
