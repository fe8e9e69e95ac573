"""The ready nodes of one cell type, in the order of their subgraphs: what a task is formed from. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_LEAST_ROOM = 256


class ReadyNodes:
    """A queue of nodes sorted by the rank of their subgraph, taken from the front and put back there.

    Both ends grow within one buffer, so taking 64 nodes and putting back their successors moves 64 numbers, however
    many wait behind them.

    Args:
        queue: record of its ends and its memory: compiled code's struct of that name, or any object.
        room: free slots to begin with.
    """

    def __init__(self, queue: Any, room: int = _LEAST_ROOM) -> None:
        self._queue = queue
        self._take_memory(np.empty((2, room), dtype=np.int64))
        queue.head = queue.tail = room // 2

    def __len__(self) -> int:
        length: int = self._queue.tail - self._queue.head
        return length

    def append(self, nodes: Ints, ranks: Ints | int) -> None:
        """Append nodes of subgraphs just released, ``ranks`` rising: behind all others."""
        if self._queue.tail + len(nodes) > self._queue.room:
            self.make_room(len(nodes))
        start = self._queue.tail
        self._queue.tail += len(nodes)
        self._nodes[start : self._queue.tail] = nodes
        self._ranks[start : self._queue.tail] = ranks

    def peek(self, limit: int) -> tuple[Ints, Ints]:
        """Return views of the first nodes, at most ``limit``, and of their ranks."""
        head = self._queue.head
        end = min(head + limit, self._queue.tail)
        return self._nodes[head:end], self._ranks[head:end]

    def drop(self, count: int) -> None:
        """Forget the first ``count`` nodes."""
        self._queue.head += count

    def put_back(self, nodes: Ints, ranks: Ints) -> None:
        """Put nodes before the others, ``ranks`` rising; merge them where others rank before them."""
        if not len(nodes):
            return
        others, their_ranks = self.peek(len(self))
        if len(others) and their_ranks[0] < ranks[-1]:
            mixed = int(np.searchsorted(their_ranks, ranks[-1]))
            nodes = np.concatenate([nodes, others[:mixed]])
            ranks = np.concatenate([ranks, their_ranks[:mixed]])
            self.drop(mixed)
            order = np.argsort(ranks, kind="stable")
            nodes, ranks = nodes[order], ranks[order]
        if self._queue.head < len(nodes):
            self.make_room(len(nodes))
        end = self._queue.head
        self._queue.head -= len(nodes)
        self._nodes[self._queue.head : end] = nodes
        self._ranks[self._queue.head : end] = ranks

    def remove(self, ranks: Ints) -> None:
        """Forget the nodes of the subgraphs of those ranks: their chains have stopped, or their request leaves."""
        nodes, own = self.peek(len(self))
        keep = np.isin(own, ranks, invert=True)
        if keep.all():
            return
        head = self._queue.head
        self._queue.tail = head + int(np.count_nonzero(keep))
        self._nodes[head : self._queue.tail] = nodes[keep]
        self._ranks[head : self._queue.tail] = own[keep]

    def make_room(self, count: int) -> None:
        """Make at least ``count`` free slots at both ends."""
        nodes, ranks = self.peek(len(self))
        memory = np.empty((2, max(_LEAST_ROOM, 4 * (len(nodes) + count))), dtype=np.int64)
        head = (memory.shape[1] - len(nodes)) // 2
        memory[0, head : head + len(nodes)] = nodes
        memory[1, head : head + len(nodes)] = ranks
        self._queue.head, self._queue.tail = head, head + len(nodes)
        self._take_memory(memory)

    def _take_memory(self, memory: Ints) -> None:
        """Use ``memory`` [2, room] for nodes and ranks from now on."""
        self._nodes, self._ranks = memory
        self._queue.nodes, self._queue.ranks = self._nodes.ctypes.data, self._ranks.ctypes.data
        self._queue.room = len(self._nodes)
