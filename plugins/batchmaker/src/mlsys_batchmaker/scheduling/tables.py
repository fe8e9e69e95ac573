"""Nodes and subgraphs of all live requests, as columns, and the queues of ready nodes. No logic.

A request is a block of rows in each column. Columns and not objects, so that compiled code sees the same memory through
its structs ``Columns`` and ``Queue``, and one call does what happens to a batch of 64 cells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsys_batchmaker.plan.plan import COLUMNS, SUB_COLUMNS

Ints = NDArray[np.int64]
# Columns of a request: LEFT, subgraphs not finished; LEAVING, 1 if it has left but has cells in flight. Only compiled
# code uses the others: the first of its nodes, subgraphs and slots, the number of its subgraphs and slots, and
# the address of the results asked for in its plan.
LEFT, LEAVING, REQUEST_COLUMNS = 0, 1, 8
_LEAST_ROOM = 256


class Tables:
    """The columns; they hold absolute numbers.

    Args:
        num_inputs: most inputs of a cell.
        num_outputs: most outputs of a cell.
        columns: compiled code's struct of that name, all zeros.
    """

    def __init__(self, num_inputs: int, num_outputs: int, columns: Any) -> None:
        width = COLUMNS + num_inputs + num_outputs
        self.shared = columns
        self.shared.width, self.shared.num_inputs = width, num_inputs
        self.shared.num_released = 1  # rank 0: not released yet
        self.node_fixed: Ints = np.empty((0, width), dtype=np.int64)  # as ``GraphPlan.nodes``
        self.node_waiting: Ints = np.empty(0, dtype=np.int64)  # predecessors in its subgraph that are not submitted
        self.subs: Ints = np.empty((0, SUB_COLUMNS), dtype=np.int64)  # as ``GraphPlan.subs``
        self._requests: Ints = np.empty((0, REQUEST_COLUMNS), dtype=np.int64)
        self.reserve(1, 1, 1)

    def reserve(self, num_nodes: int, num_subs: int, num_requests: int) -> None:
        """Reserve room for that many rows."""
        if num_nodes > len(self.node_waiting):
            self.node_fixed, self.node_waiting = (
                _grown(self.node_fixed, num_nodes),
                _grown(self.node_waiting, num_nodes),
            )
            self.shared.nodes, self.shared.waiting = self.node_fixed.ctypes.data, self.node_waiting.ctypes.data
        if num_subs > len(self.subs):
            self.subs = _grown(self.subs, num_subs)
            self.shared.subs = self.subs.ctypes.data
            self.sub_request, self.sub_pinned, self.sub_unsubmitted, self.sub_unfinished = self.subs.T[:4]
            self.sub_waiting, self.sub_next, self.sub_start, self.sub_end = self.subs.T[4:8]
            self.sub_rank, self.sub_stop, self.sub_cell, self.sub_ready = self.subs.T[8:]
        if num_requests > len(self._requests):
            self._requests = _grown(self._requests, num_requests)
            self.shared.requests = self._requests.ctypes.data
            self.request_unfinished, self.request_leaving = self._requests[:, LEFT], self._requests[:, LEAVING]


def _grown(column: Ints, count: int) -> Ints:
    added = max(count, 2 * len(column), 256) - len(column)
    return np.concatenate([column, np.zeros((added, *column.shape[1:]), dtype=column.dtype)])


class ReadyNodes:
    """A queue of nodes sorted by the rank of their subgraph, taken from the front and put back there.

    Both ends grow within one buffer, so taking 64 nodes and putting back their successors moves 64 numbers, however
    many wait behind them.

    Args:
        queue: compiled code's struct of that name: its ends and its memory.
        room: free slots to begin with.
    """

    def __init__(self, queue: Any, room: int = _LEAST_ROOM) -> None:
        self._queue = queue
        self._take_memory(np.empty((2, room), dtype=np.int64))
        queue.head = queue.tail = room // 2

    def __len__(self) -> int:
        length: int = self._queue.tail - self._queue.head
        return length

    def peek(self, limit: int) -> tuple[Ints, Ints]:
        """Return views of the first nodes, at most ``limit``, and of their ranks."""
        head = self._queue.head
        end = min(head + limit, self._queue.tail)
        return self._nodes[head:end], self._ranks[head:end]

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
