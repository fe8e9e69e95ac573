"""The plan of a structure: what the scheduler needs of a cell graph (BatchMaker, section 4.3).

A subgraph is a set of connected nodes of one cell type whose dependencies on the rest of the graph are all satisfied
before it is released. Each node gets a *stage*: the largest number of changes of cell type on a path to it. Connected
nodes of equal type and stage form a subgraph; so an edge between subgraphs always leads to a later stage, and no two
subgraphs wait for each other, even where a type comes, goes and comes again.

The plan also says which rows of which banks each node reads and writes. A node writes over the row of a predecessor
in its subgraph that nobody else reads: a chain has one row per output however long it is, a tree one per leaf.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Pairs: TypeAlias = tuple[tuple[int, int], ...]
SUB, NEXT, SLOT, COLUMNS = range(4)  # columns of a node: subgraph; first successor in it, or -1; result slot, or -1
# Columns of a subgraph: the request; the worker it is pinned to; nodes not submitted; nodes not
# completed, of which those beyond the unsubmitted are in flight; subgraphs that must be finished before; the first
# subgraph that waits for this one, or -1; its first node; one above its last; the order of its release; the node that
# gave the stop value, or NEVER; its cell type; nodes that wait for no other of it, which come first.
REQUEST, PINNED, UNSUBMITTED, UNFINISHED, WAITING, FOLLOWING, START, END, RANK, STOP, CELL, READY, SUB_COLUMNS = range(
    13
)
UNPINNED = -1
NEVER = np.iinfo(np.int64).max // 2


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties that the subgraphs of one cell type share in a structure."""

    cell: int
    carry: tuple[int, ...] | None  # a chain's input -> output of the node before, -1 for others; None: it is no chain;
    # (): it is one node, which carries nothing
    joins: bool  # a node waits for several of its subgraph
    is_awaited: bool  # other subgraphs wait for it


@dataclass(frozen=True, slots=True, eq=False)
class GraphPlan:
    """Numbers of one structure that the scheduler needs; read only, since all requests of that structure share them.

    Nodes are renumbered: subgraph by subgraph in topological order, those that are ready at once first in each.

    ``nodes`` holds relative numbers: added to ``bases[node_bases]`` they are a request's rows of the scheduler's table,
    where ``bases`` are the starts of its blocks in each bank, a 0 for what stands by itself (:attr:`Layout.none`; so an
    input without a source reads row 0, which is zeros), the starts of its nodes, of its subgraphs and of its slots.
    """

    block: Ints  # all of its numbers, one after another as the properties below; made and read in one go
    num_nodes: int
    num_columns: int  # columns of a node
    num_subgraphs: int
    num_slots: int  # results asked for
    num_rows: tuple[int, ...]  # rows needed in each bank, constants first
    kinds: tuple[Kind, ...]  # each that occurs, once
    more: Pairs  # (node, successor) for further successors in the same subgraph
    sub_more: Pairs  # (subgraph, other) for further subgraphs that wait for one
    result_cell: int | None  # cell type of all results; None: they are of several
    blocks: tuple[int, ...] = field(init=False)  # sizes of the blocks of numbers that a request holds: rows by bank,
    # nodes, subgraphs, results, its index; powers of two, 0 for none

    def __post_init__(self) -> None:
        counts = (*self.num_rows, self.num_nodes, self.num_subgraphs, self.num_slots, 1)
        object.__setattr__(self, "blocks", tuple([count and 1 << (count - 1).bit_length() for count in counts]))

    @property
    def nodes(self) -> Ints:
        """[n, COLUMNS + num_inputs + num_outputs]: SUB, NEXT, SLOT, rows it reads, rows it writes."""
        return self.block[: self.num_nodes * self.num_columns].reshape(self.num_nodes, self.num_columns)

    @property
    def node_bases(self) -> Ints:
        """[n, COLUMNS + num_inputs + num_outputs]: indices in ``bases`` of what is added to :attr:`nodes`."""
        size = self.num_nodes * self.num_columns
        return self.block[size : 2 * size].reshape(self.num_nodes, self.num_columns)

    @property
    def waiting(self) -> Ints:
        """[n] predecessors in the same subgraph."""
        size = 2 * self.num_nodes * self.num_columns
        return self.block[size : size + self.num_nodes]

    @property
    def subs(self) -> Ints:
        """[s, SUB_COLUMNS] what the scheduler notes of a subgraph when its request comes."""
        return self._after_nodes(0, self.num_subgraphs * SUB_COLUMNS).reshape(-1, SUB_COLUMNS)

    @property
    def sub_bases(self) -> Ints:
        """[s, SUB_COLUMNS]: what is added to :attr:`subs`: 0, the start of its nodes or subgraphs, or its index."""
        size = self.num_subgraphs * SUB_COLUMNS
        return self._after_nodes(size, size).reshape(-1, SUB_COLUMNS)

    @property
    def origin(self) -> Ints:
        """[n] the node's number in the cell graph."""
        return self._after_nodes(2 * self.num_subgraphs * SUB_COLUMNS, self.num_nodes)

    @property
    def asked(self) -> Ints:
        """[4, results asked for]: node; slot, from the request's first on; the node's subgraph and cell."""
        return self.block[len(self.block) - 4 * self.num_slots :].reshape(4, -1)

    def _after_nodes(self, skipped: int, count: int) -> Ints:
        start = self.num_nodes * (2 * self.num_columns + 1) + skipped
        return self.block[start : start + count]
