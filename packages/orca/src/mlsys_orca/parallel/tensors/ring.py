"""Tensors of the iterations in flight, in memory that the processes of one host share.

Each memory is one anonymous file, sparse: a page that no iteration has used takes nothing. It is divided into as many
slots as iterations may be in flight, and iteration ``n`` has slot ``n % depth``: the master begins no iteration before
the one that had its slot has ended, so nobody waits for room. A reader of states waits on an eventfd of its own.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Sequence
from math import prod
from typing import Self

import torch
from mlsys_core.errors import ServingError
from mlsys_core.posix import lock_for_process, memory_file, new_event, raise_event, take_event
from torch import Tensor

from mlsys_orca.parallel.shard import GroupBrokenError

_PEAK_NBYTES = 16  # float64: the largest logit, and its column


def new_memory(name: str, nbytes: int) -> int:
    """Return the descriptor of a new anonymous file of that size, which takes memory as it is written to."""
    fd = memory_file(name)
    os.ftruncate(fd, nbytes)
    return fd


def new_wake() -> int:
    """Return the descriptor of a counter that one process adds to and another takes from."""
    return new_event(counts=True)


class Slots:
    """The memory behind a descriptor, in ``depth`` slots."""

    def __init__(self, fd: int, *, depth: int, slot_nbytes: int) -> None:
        self._depth, self._slot_nbytes = depth, slot_nbytes
        self._memory = mmap.mmap(fd, depth * slot_nbytes)

    def take(self, number: int, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0) -> Tensor:
        """Return the tensor that begins ``offset`` bytes into the slot of iteration ``number``.

        Raises:
            ServingError: the slot is too small for it.
        """
        count = prod(shape)
        if offset + count * dtype.itemsize > self._slot_nbytes:
            raise ServingError(
                f"{count * dtype.itemsize} bytes of an iteration do not fit its slot of {self._slot_nbytes}"
            )
        if not count:
            return torch.empty(shape, dtype=dtype)
        start = number % self._depth * self._slot_nbytes + offset
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).view(shape)


def states_nbytes(max_tokens: int, hidden_size: int) -> int:
    """Return the bytes of one iteration's states, in whole pages."""
    return _pages(max_tokens * hidden_size * 4)


class RingOut:
    """Stage's end of a ring of states: :class:`~mlsys_orca.parallel.channels.StatesOut`.

    Args:
        slots: The memory.
        hidden_size: Of the model.
        wakes: One counter for each rank of the next stage.
    """

    def __init__(self, slots: Slots, hidden_size: int, wakes: Sequence[int]) -> None:
        self._slots, self._hidden_size, self._wakes = slots, hidden_size, wakes

    def room(self, number: int, num_tokens: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.StatesOut`."""
        return self._slots.take(number, (num_tokens, self._hidden_size), torch.float32)

    def send(self, number: int) -> None:
        """See :class:`~mlsys_orca.parallel.channels.StatesOut`."""
        for wake in self._wakes:
            raise_event(wake)


class RingIn:
    """Rank's end of a ring of states: :class:`~mlsys_orca.parallel.channels.StatesIn`.

    Args:
        slots: The memory.
        hidden_size: Of the model.
        wake: This rank's counter.
        life: A descriptor that is hung up when states will not come any more.
    """

    def __init__(self, slots: Slots, hidden_size: int, wake: int, life: int) -> None:
        self._slots, self._hidden_size, self._wake, self._life = slots, hidden_size, wake, life
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        self._poll.register(life, select.POLLRDHUP)

    def receive(self, number: int, num_tokens: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.StatesIn`."""
        while True:
            ready = dict(self._poll.poll())
            if self._wake in ready:
                take_event(self._wake)
                return self._slots.take(number, (num_tokens, self._hidden_size), torch.float32)
            if self._life in ready:
                raise GroupBrokenError("the stage before this one is gone")


class Results:
    """Logits, or where each row's largest is, from the ranks of the last stage to the master.

    Args:
        fd: The memory.
        depth: Iterations in flight at most.
        max_rows: Rows of logits of an iteration at most.
        vocab_size: Of the whole model.
        num_ranks: Of the last stage.
    """

    def __init__(self, fd: int, *, depth: int, max_rows: int, vocab_size: int, num_ranks: int) -> None:
        self._vocab_size, self._num_ranks, self._max_rows = vocab_size, num_ranks, max_rows
        nbytes = self.slot_nbytes(max_rows=max_rows, vocab_size=vocab_size, num_ranks=num_ranks)
        self._slots = Slots(fd, depth=depth, slot_nbytes=nbytes)

    @staticmethod
    def slot_nbytes(*, max_rows: int, vocab_size: int, num_ranks: int) -> int:
        """Return the bytes of one iteration's results, in whole pages."""
        return _pages(num_ranks * max_rows * _PEAK_NBYTES) + _pages(max_rows * vocab_size * 4)

    def logits(self, number: int, num_rows: int) -> Tensor:
        """Return fp32 [num_rows, vocab_size] of iteration ``number``."""
        offset = _pages(self._num_ranks * self._max_rows * _PEAK_NBYTES)
        return self._slots.take(number, (num_rows, self._vocab_size), torch.float32, offset=offset)

    def peaks(self, number: int, num_rows: int) -> Tensor:
        """Return float64 [num_ranks, num_rows, 2] of iteration ``number``."""
        return self._slots.take(number, (self._num_ranks, num_rows, 2), torch.float64)

    def of_rank(self, rank: int) -> RankResults:
        """Return the end of one rank."""
        return RankResults(self, rank)


class RankResults:
    """Results as one rank writes them: :class:`~mlsys_orca.parallel.channels.ResultsOut`."""

    def __init__(self, results: Results, rank: int) -> None:
        self._results, self._rank = results, rank

    def logits(self, number: int, num_rows: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.ResultsOut`."""
        return self._results.logits(number, num_rows)

    def peaks(self, number: int, num_rows: int) -> Tensor:
        """See :class:`~mlsys_orca.parallel.channels.ResultsOut`."""
        return self._results.peaks(number, num_rows)[self._rank]

    def send(self, number: int) -> None:
        """Do nothing: the master reads the same memory."""


class KvMemory:
    """Memory for the keys and values of one place, for each replica; it outlives the processes that use it.

    Made before the first fork, by whoever lives longest. A rank takes a replica's with :meth:`take`, which waits until
    the rank before has ended: two never write to the same blocks.

    Args:
        num_replicas: Engines, each with keys and values of its own.
    """

    def __init__(self, num_replicas: int = 1) -> None:
        self._fds = [memory_file("orca-kv") for _ in range(num_replicas)]
        self._identities = [os.urandom(8).hex() for _ in range(num_replicas)]

    def identity(self, replica: int) -> str:
        """Return a name of a replica's memory that no other memory has."""
        return self._identities[replica]

    def take(self, replica: int) -> KvAllocator:
        """Return the memory of a replica, when no other process has it any more."""
        lock_for_process(self._fds[replica])
        return KvAllocator(self._fds[replica])

    def close(self) -> None:
        """Close this process's descriptors. Idempotent."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KvAllocator:
    """Maker of tensors in a :class:`KvMemory`: :data:`~mlsys_orca.model.kv_cache.Empty`.

    The same calls give the same places, so a rank finds what the one before had written.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._offset = fd, 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of that shape; its contents are those of before."""
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        nbytes = _pages(count * dtype.itemsize)
        if os.fstat(self._fd).st_size < self._offset + nbytes:
            os.ftruncate(self._fd, self._offset + nbytes)
        memory = mmap.mmap(self._fd, nbytes, offset=self._offset)
        self._offset += nbytes
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def _pages(nbytes: int) -> int:
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
