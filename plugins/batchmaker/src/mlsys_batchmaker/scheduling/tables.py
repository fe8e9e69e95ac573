"""Nodes and subgraphs of all live requests, as columns: one request is a block of rows in each. No logic.

Columns and not objects, so that what happens to a batch of 64 cells is a handful of NumPy calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlsys_batchmaker.plan.partition import COLUMNS

Ints = NDArray[np.int64]
UNPINNED = -1
NEVER = np.iinfo(np.int64).max // 2


class Tables:
    """The columns; they hold absolute numbers.

    Args:
        num_inputs: most inputs of a cell.
        num_outputs: most outputs of a cell.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        empty = np.empty(0, dtype=np.int64)
        self.node_fixed: Ints = np.empty((0, COLUMNS + num_inputs + num_outputs), dtype=np.int64)  # as ``Plan.nodes``
        self.node_waiting: Ints = empty  # predecessors in its subgraph that are not submitted
        self.sub_request: Ints = empty
        self.sub_pinned: Ints = empty  # worker, or UNPINNED
        self.sub_unsubmitted: Ints = empty  # nodes not submitted
        self.sub_unfinished: Ints = empty  # nodes not completed; those beyond the unsubmitted are in flight
        self.sub_waiting: Ints = empty  # subgraphs that must be finished before
        self.sub_next: Ints = empty  # the first subgraph that waits for this one, or -1
        self.sub_start: Ints = empty
        self.sub_end: Ints = empty  # one above its last node
        self.sub_rank: Ints = empty  # order of release
        self.sub_stop: Ints = empty  # the node that gave the stop value, or NEVER
        self.request_unfinished: Ints = empty  # subgraphs not finished

    def reserve(self, num_nodes: int, num_subs: int, num_requests: int) -> None:
        """Room for that many rows."""
        for have, want, prefix in (
            (len(self.node_waiting), num_nodes, "node_"),
            (len(self.sub_request), num_subs, "sub_"),
            (len(self.request_unfinished), num_requests, "request_"),
        ):
            if want > have:
                self._grow(prefix, max(want, 2 * have, 256) - have)

    def _grow(self, prefix: str, by: int) -> None:
        for name, column in list(vars(self).items()):
            if name.startswith(prefix):
                added = np.zeros((by, *column.shape[1:]), dtype=column.dtype)
                setattr(self, name, np.concatenate([column, added]))
