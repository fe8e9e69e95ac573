"""Tensors between the processes of one group: a process group of torch.distributed (gloo) for each.

Its processes meet in a store that the master opens; addresses are Ray's. gloo neither encrypts nor authenticates, so
the nodes' network must be private.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed
from mlsys_orca.parallel.shard import GroupBrokenError
from torch import Tensor

distributed: Any = torch.distributed  # whose compiled classes have no annotations
Work = Any  # of torch.distributed: a tensor on its way
MEET_S = 60.0  # for all processes of a group to meet
TIMEOUT_S = 600.0  # of one tensor: a stage may compute a long prompt before it comes
STATES, RESULTS, SUMS = 1, 2, 3  # tags: tensors of one tag between two processes come in order


def open_store(host: str, size: int, port: int = 0, *, is_master: bool) -> Any:
    """Open the store in which the processes of a group meet, or connect to it.

    Args:
        host: The master's address.
        size: Number of processes.
        port: Of the store; 0: any free one.
        is_master: It is this process's.

    Raises:
        GroupBrokenError: it cannot be reached.
    """
    timeout = datetime.timedelta(seconds=MEET_S)
    try:
        return distributed.TCPStore(host, port, size, is_master=is_master, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise GroupBrokenError(f"the group's master cannot be reached: {error}") from error


class TensorGroup:
    """Way of tensors between the processes of a group: number 0 is the master, then the ranks by place.

    Args:
        store: In which they meet.
        number: This process's.
        size: Number of processes.
        address: This host's, as the others reach it.

    Raises:
        GroupBrokenError: some cannot be reached.
    """

    def __init__(self, store: Any, number: int, size: int, *, address: str) -> None:
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = datetime.timedelta(seconds=TIMEOUT_S)
        try:
            self._group = distributed.ProcessGroupGloo(store, number, size, options)
        except RuntimeError as error:
            raise GroupBrokenError(f"the group's processes cannot reach each other: {error}") from error

    def send(self, tensor: Tensor, to: int, tag: int) -> Work:
        """Begin to send a contiguous tensor; who calls keeps it unchanged until the work has ended.

        Raises:
            GroupBrokenError: the other process is gone.
        """
        try:
            return self._group.send([tensor], to, tag)
        except RuntimeError as error:
            raise GroupBrokenError(f"a process of the group is gone: {error}") from error

    def receive(self, tensor: Tensor, sender: int, tag: int) -> None:
        """Fill a contiguous tensor with the next one of that tag from another process.

        Raises:
            GroupBrokenError: the other process is gone, or silent for :data:`TIMEOUT_S`.
        """
        try:
            self._group.recv([tensor], sender, tag).wait()
        except RuntimeError as error:
            raise GroupBrokenError(f"a process of the group is gone: {error}") from error


class Outbox:
    """Tensors on their way: each is kept until it was sent, and only so many wait.

    Args:
        group: Their way.
        tag: Of all of them.
        depth: Tensors to each receiver that may wait.
    """

    def __init__(self, group: TensorGroup, tag: int, *, depth: int) -> None:
        self._group, self._tag, self._depth = group, tag, depth
        self._sending: list[tuple[Tensor, list[Work]]] = []

    def send(self, tensor: Tensor, receivers: list[int]) -> None:
        """Send a tensor, which is not changed any more, to some processes.

        Raises:
            GroupBrokenError: one is gone.
        """
        while len(self._sending) >= self._depth:
            for work in self._sending.pop(0)[1]:
                wait_for(work)
        self._sending.append((tensor, [self._group.send(tensor, to, self._tag) for to in receivers]))


def wait_for(work: Work) -> None:
    """Wait until a tensor was sent.

    Raises:
        GroupBrokenError: its receiver is gone.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupBrokenError(f"a process of the group is gone: {error}") from error


def empty(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [num_rows, num_columns], uninitialised."""
    return torch.empty(num_rows, num_columns, dtype=dtype)
