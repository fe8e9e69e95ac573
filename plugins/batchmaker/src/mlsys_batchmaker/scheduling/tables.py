"""Nodes and subgraphs of all live requests, as columns: one request is a block of rows in each. No logic.

Columns and not objects, so that what happens to a batch of 64 cells is a handful of NumPy calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlsys_batchmaker.plan.partition import COLUMNS, SUB_COLUMNS

Ints = NDArray[np.int64]


class Tables:
    """The columns; they hold absolute numbers.

    Args:
        num_inputs: most inputs of a cell.
        num_outputs: most outputs of a cell.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.node_fixed: Ints = np.empty((0, COLUMNS + num_inputs + num_outputs), dtype=np.int64)  # as ``Plan.nodes``
        self.node_waiting: Ints = np.empty(0, dtype=np.int64)  # predecessors in its subgraph that are not submitted
        self.request_unfinished: Ints = np.empty(0, dtype=np.int64)  # subgraphs not finished
        self._set_subs(np.empty((0, SUB_COLUMNS), dtype=np.int64))

    def reserve(self, num_nodes: int, num_subs: int, num_requests: int) -> None:
        """Room for that many rows."""
        if num_nodes > len(self.node_waiting):
            self.node_fixed, self.node_waiting = (
                _grown(self.node_fixed, num_nodes),
                _grown(self.node_waiting, num_nodes),
            )
        if num_subs > len(self.subs):
            self._set_subs(_grown(self.subs, num_subs))
        if num_requests > len(self.request_unfinished):
            self.request_unfinished = _grown(self.request_unfinished, num_requests)

    def _set_subs(self, subs: Ints) -> None:
        """Take the subgraphs' rows, written whole as ``Plan.subs``, and name their columns."""
        self.subs = subs
        self.sub_request, self.sub_pinned, self.sub_unsubmitted, self.sub_unfinished = subs.T[:4]
        self.sub_waiting, self.sub_next, self.sub_start, self.sub_end, self.sub_rank, self.sub_stop = subs.T[4:]


def _grown(column: Ints, count: int) -> Ints:
    added = max(count, 2 * len(column), 256) - len(column)
    return np.concatenate([column, np.zeros((added, *column.shape[1:]), dtype=column.dtype)])
