"""Nodes and subgraphs of all live requests, as columns: one request is a block of rows in each. No logic.

Columns and not objects, so that what happens to a batch of 64 cells is a few calls of NumPy, or one of compiled code,
which sees the same memory through its struct ``Columns``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsys_batchmaker.plan.plan import COLUMNS, SUB_COLUMNS

Ints = NDArray[np.int64]
# Of a request: subgraphs not finished; 1: it has left, but something of it is in flight. The others are for compiled
# code alone: where its nodes, subgraphs and slots begin, how many subgraphs and slots it has, where its plan says what
# is asked for.
LEFT, LEAVING, REQUEST_COLUMNS = 0, 1, 8


class Tables:
    """The columns; they hold absolute numbers.

    Args:
        num_inputs: most inputs of a cell.
        num_outputs: most outputs of a cell.
        columns: compiled code's struct of that name, all zeros; None: there is no compiled code.
    """

    def __init__(self, num_inputs: int, num_outputs: int, columns: Any = None) -> None:
        width = COLUMNS + num_inputs + num_outputs
        self.shared = SimpleNamespace() if columns is None else columns
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
