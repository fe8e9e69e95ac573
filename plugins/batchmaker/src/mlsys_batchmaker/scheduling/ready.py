"""The ready nodes of one cell type, in the order of their subgraphs: what a task is formed from. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_NONE = np.empty(0, dtype=np.int64)


class ReadyNodes:
    """A queue of nodes sorted by the rank of their subgraph, taken from the front and put back there.

    Both ends grow within one buffer, so taking 64 nodes and putting back their successors moves 64 numbers, however
    many wait behind them.

    Args:
        room: places to begin with.
    """

    def __init__(self, room: int = 256) -> None:
        self._nodes = np.empty(room, dtype=np.int64)
        self._ranks = np.empty(room, dtype=np.int64)
        self._head = self._tail = room // 2

    def __len__(self) -> int:
        return self._tail - self._head

    def append(self, nodes: Ints, ranks: Ints | int) -> None:
        """Nodes of subgraphs just released, ``ranks`` rising: behind all others."""
        if self._tail + len(nodes) > len(self._nodes):
            self._make_room(len(nodes))
        end = self._tail + len(nodes)
        self._nodes[self._tail : end] = nodes
        self._ranks[self._tail : end] = ranks
        self._tail = end

    def peek(self, limit: int) -> tuple[Ints, Ints]:
        """Views of the first nodes, at most ``limit``, and their ranks."""
        end = min(self._head + limit, self._tail)
        return self._nodes[self._head : end], self._ranks[self._head : end]

    def drop(self, count: int) -> None:
        """Forget the first ``count`` nodes."""
        self._head += count

    def put_back(self, nodes: Ints, ranks: Ints) -> None:
        """Nodes before the others, ``ranks`` rising; merged where others rank before them."""
        if not len(nodes):
            return
        if self._head < self._tail and self._ranks[self._head] < ranks[-1]:
            mixed = int(np.searchsorted(self._ranks[self._head : self._tail], ranks[-1]))
            nodes = np.concatenate([nodes, self._nodes[self._head : self._head + mixed]])
            ranks = np.concatenate([ranks, self._ranks[self._head : self._head + mixed]])
            self._head += mixed
            order = np.argsort(ranks, kind="stable")
            nodes, ranks = nodes[order], ranks[order]
        if self._head < len(nodes):
            self._make_room(len(nodes))
        start = self._head - len(nodes)
        self._nodes[start : self._head] = nodes
        self._ranks[start : self._head] = ranks
        self._head = start

    def remove(self, ranks: Ints) -> None:
        """Forget the nodes of the subgraphs of those ranks: their chains have stopped, or their request leaves."""
        own = self._ranks[self._head : self._tail]
        keep = np.isin(own, ranks, invert=True)
        if keep.all():
            return
        nodes, own = self._nodes[self._head : self._tail][keep], own[keep]
        self._tail = self._head + len(nodes)
        self._nodes[self._head : self._tail] = nodes
        self._ranks[self._head : self._tail] = own

    def _make_room(self, count: int) -> None:
        """At least ``count`` free places at both ends."""
        size = len(self)
        room = 4 * (size + count)
        nodes, ranks = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
        head = (room - size) // 2
        nodes[head : head + size] = self._nodes[self._head : self._tail]
        ranks[head : head + size] = self._ranks[self._head : self._tail]
        self._nodes, self._ranks, self._head, self._tail = nodes, ranks, head, head + size
