"""Tensors between the processes of one group on several hosts: one gloo group of torch.distributed for each.

Its processes find each other through a :class:`PutStore`, which travels over the authenticated control channel: there
is no port to which strangers could write. The tensors themselves are neither encrypted nor authenticated by gloo, so
the hosts' network must be private.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from mlsys_core.errors import ServingError
from torch import Tensor

from mlsys_orca.parallel.shard import GroupBrokenError

distributed: Any = torch.distributed  # whose compiled classes have no annotations
Work = Any  # of torch.distributed: a tensor on its way
TIMEOUT_S = 600.0  # of one tensor: a stage may compute a long prompt before it comes
STATES, RESULTS, SUMS = 1, 2, 3  # tags: tensors of one tag between two processes come in order


class PutStore(distributed.Store):  # type: ignore[misc]  # see above
    """A store of torch.distributed: own entries are told to the others by ``tell``, theirs come to :meth:`put`.

    Args:
        tell: Sends an entry of this process to the others.
        timeout_s: That a reader waits for an entry.
    """

    def __init__(self, tell: Callable[[str, bytes], None], *, timeout_s: float) -> None:
        super().__init__()
        self._tell, self._timeout_s = tell, timeout_s
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Have an entry of another process."""
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """Have an entry of this process, and tell the others."""
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, encoded)
        self._tell(key, encoded)

    def get(self, key: str) -> bytes:
        """Wait for an entry and return it.

        Raises:
            ServingError: it does not come.
        """
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait for entries.

        Raises:
            ServingError: they do not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._entries for key in keys), self._timeout_s):
                raise ServingError("the processes of a group did not find each other in time")

    def check(self, keys: list[str]) -> bool:
        """Return whether all of some entries are there."""
        with self._changed:
            return all(key in self._entries for key in keys)

    def has_extended_api(self) -> bool:
        """Return False: there is no ``multi_get``."""
        return False


class TensorGroup:
    """Way of tensors between the processes of a group: number 0 is the master, then the ranks by place.

    Args:
        store: In which they find each other.
        number: This process's.
        size: Number of processes.
        address: Address of this host that the others reach.

    Raises:
        GroupBrokenError: some cannot be reached.
    """

    def __init__(self, store: PutStore, number: int, size: int, *, address: str) -> None:
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
