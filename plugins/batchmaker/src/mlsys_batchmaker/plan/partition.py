"""From a cell graph to subgraphs: what is released to the scheduler at once (BatchMaker, section 4.3).

A subgraph is a set of connected nodes of one cell type whose dependencies on the rest of the graph are all satisfied
before it is released. Each node gets a *stage*: the largest number of changes of cell type on a path to it. Connected
nodes of equal type and stage form a subgraph; so an edge between subgraphs always leads to a later stage, and no two
subgraphs wait for each other, even where a type comes, goes and comes again.

The planner also says which rows of which banks each node reads and writes. A node writes over the row of a predecessor
in its subgraph that nobody else reads: a chain has one row per output however long it is, a tree one per leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_batchmaker.plan.graph import CellGraph
from mlsys_batchmaker.plan.grouping import group_nodes
from mlsys_batchmaker.plan.layout import Layout

Ints = NDArray[np.int64]
SUB, NEXT, SLOT, COLUMNS = range(4)  # of a node: its subgraph, first successor in it or -1, slot of its results or -1
SUB_COLUMNS = 10  # of a subgraph: see ``Plan.subs``
UNPINNED = -1
NEVER = np.iinfo(np.int64).max // 2


@dataclass(frozen=True, slots=True)
class Kind:
    """What the subgraphs of one cell type are like in a structure."""

    cell: int
    carries: tuple[tuple[int, ...] | None, ...]  # the different entries of ``Plan.sub_carry``
    joins: bool  # a node waits for several of its subgraph
    is_awaited: bool  # other subgraphs wait for one of them


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """Subgraphs of one cell type that are released together."""

    cell: int
    subs: Ints  # [k]
    nodes: Ints  # their first nodes, those that are ready at once, subgraph by subgraph
    ranks: Ints  # of those nodes: the place of their subgraph in ``subs``


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What the scheduler needs of a structure; shared by all requests that have it, so read only.

    Nodes are renumbered: subgraph by subgraph in topological order, those that are ready at once first in each.

    ``nodes`` holds relative numbers: added to ``bases[node_bases]`` they are a request's rows of the scheduler's table,
    where ``bases`` are the starts of its blocks in each bank, a 0 for what stands by itself (:attr:`Layout.none`; so an
    input without a source reads row 0, which is zeros), the starts of its nodes, of its subgraphs and of its slots.
    """

    origin: Ints  # [n] the node's number in the cell graph
    nodes: Ints  # [n, COLUMNS + num_inputs + num_outputs]: SUB, NEXT, SLOT, rows it reads, rows it writes
    node_bases: Ints  # of the same shape
    more: tuple[tuple[int, int], ...]  # (node, successor) for further successors in the same subgraph
    waiting: Ints  # [n] predecessors in the same subgraph
    result_nodes: Ints  # nodes whose results the request gets, in the order asked for
    result_slots: Ints  # by result asked for: where its values are kept, from the request's first slot on
    result_cells: Ints  # by result asked for: the cell of its node
    num_result_cells: int  # how many different ones
    first_result_cell: int
    num_slots: int
    # What the scheduler notes of a subgraph when its request comes: the request; the worker it is pinned to; nodes not
    # submitted; nodes not completed, of which those beyond the unsubmitted are in flight; subgraphs that must be
    # finished before; the first subgraph that waits for this one, or -1; its first node; one above its last; the order
    # of its release; the node that gave the stop value, or NEVER.
    subs: Ints  # [s, SUB_COLUMNS]
    sub_bases: Ints  # of the same shape: to be added are 0, the start of its nodes, of its subgraphs, or its index
    sub_cell: Ints  # [s]
    sub_start: Ints  # [s] first node
    sub_size: Ints  # [s] number of nodes
    sub_ready: Ints  # [s] nodes that wait for no other of their subgraph; the first ones
    sub_waiting: Ints  # [s] subgraphs that must be finished before
    sub_next: Ints  # [s] first subgraph that waits for this one, or -1
    sub_more: tuple[tuple[int, int], ...]  # further ones
    sub_carry: tuple[tuple[int, ...] | None, ...]  # [s] a chain's input -> output of the node before, -1 for others;
    # None if it is no chain; () if it is of one node, which carries nothing
    kinds: tuple[Kind, ...]  # one for each cell type that occurs
    released: tuple[Release, ...]  # what waits for nothing: one for each cell type that has such subgraphs
    num_rows: tuple[int, ...]  # rows needed in each bank, constants first

    @property
    def num_nodes(self) -> int:
        """Cells of the request."""
        return len(self.origin)

    @property
    def num_subgraphs(self) -> int:
        """Subgraphs of the request."""
        return len(self.sub_cell)


class Planner:
    """Plans structures of one model, each once.

    Args:
        layout: of the model's cells.
        max_plans: kept; the least recently used is forgotten first.
    """

    def __init__(self, layout: Layout, *, max_plans: int = 4096) -> None:
        self._layout = layout
        self._max_plans = max_plans
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def plan(self, graph: CellGraph) -> Plan:
        """The plan of ``graph``. Not for several threads at once.

        Raises:
            InvalidInputError: the graph has a cycle, is not connected, or wires what does not fit together.
        """
        key = graph.key
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make_plan(self._layout, *graph.structure(), must_connect=graph.must_connect)
            if len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan


def make_plan(layout: Layout, cells: Ints, codes: Ints, results: Ints, *, must_connect: bool = True) -> Plan:
    """Check a structure and plan it; see :meth:`Planner.plan`."""
    is_wire = codes > 0
    sources = np.where(is_wire, (codes - 1) // layout.num_outputs, -1)  # [n, inputs] node
    outputs = (codes - 1) % layout.num_outputs
    in_banks = np.where(codes == 0, layout.none, layout.input_banks[cells])
    _check_wires(layout, cells, is_wire, sources, outputs)
    gives = np.zeros(len(cells), dtype=np.bool_)
    gives[results] = True
    groups = group_nodes(cells, sources, gives, must_connect=must_connect)
    order, following, sub_start = groups.order, groups.next, groups.sub_start
    place = np.empty_like(order)  # node of the graph -> node of the plan
    place[order] = np.arange(len(order))

    is_wire, outputs, codes = is_wire[order], outputs[order], codes[order]
    cells, in_banks = cells[order], in_banks[order]
    sources = np.where(is_wire, place[sources[order]], -1)
    own_banks = np.where(codes < 0, in_banks, -1)
    num_constants = [int((-codes[own_banks == bank]).max(initial=0)) for bank in range(layout.none)]
    out_rows, num_rows = _place_outputs(layout, cells, groups.owner, num_constants)
    in_rows = np.where(codes < 0, -1 - codes, 0)
    in_rows[is_wire] = out_rows[sources[is_wire], outputs[is_wire]]
    slots = np.full(len(order), -1)
    slots[place[results]] = np.arange(len(results))
    sub_size = np.diff(np.append(sub_start, len(order)))
    sub_carry = tuple(
        _carry(start, start + size, sources, outputs, is_wire, out_rows)
        for start, size in zip(sub_start.tolist(), sub_size.tolist(), strict=True)
    )
    sub_cell = cells[sub_start]
    subs, sub_bases = _sub_columns(sub_start, sub_size, groups.sub_waiting, groups.sub_next)
    none, of_nodes, of_subs, of_slots = range(layout.none, layout.none + 4)
    first_output = COLUMNS + layout.num_inputs
    nodes = np.empty((len(order), first_output + layout.num_outputs), dtype=np.int64)
    node_bases = np.empty_like(nodes)
    nodes[:, SUB], node_bases[:, SUB] = np.repeat(np.arange(len(sub_start)), sub_size), of_subs
    nodes[:, NEXT], node_bases[:, NEXT] = following, np.where(following >= 0, of_nodes, none)
    nodes[:, SLOT], node_bases[:, SLOT] = slots, np.where(slots >= 0, of_slots, none)
    nodes[:, COLUMNS:first_output], node_bases[:, COLUMNS:first_output] = in_rows, in_banks
    nodes[:, first_output:], node_bases[:, first_output:] = out_rows, layout.output_banks[cells]
    return Plan(
        origin=order,
        nodes=nodes,
        node_bases=node_bases,
        more=groups.more,
        waiting=groups.waiting,
        result_nodes=place[results],
        result_slots=slots[place[results]],
        result_cells=cells[place[results]],
        num_result_cells=len(set(cells[place[results]].tolist())),
        first_result_cell=int(cells[place[results[0]]]),
        num_slots=len(results),
        subs=subs,
        sub_bases=sub_bases,
        sub_cell=sub_cell,
        sub_start=sub_start,
        sub_size=sub_size,
        sub_ready=groups.sub_ready,
        sub_waiting=groups.sub_waiting,
        sub_next=groups.sub_next,
        sub_more=groups.sub_more,
        sub_carry=sub_carry,
        kinds=_kinds(cells, sub_cell, sub_carry, groups.waiting, groups.sub_next),
        released=_released(sub_cell, sub_start, groups.sub_ready, np.flatnonzero(groups.sub_waiting == 0)),
        num_rows=num_rows,
    )


def _sub_columns(start: Ints, size: Ints, waiting: Ints, following: Ints) -> tuple[Ints, Ints]:
    """``Plan.subs`` and ``Plan.sub_bases``."""
    columns = np.zeros((SUB_COLUMNS, len(start)), dtype=np.int64)
    columns[1], columns[2:4], columns[4], columns[5], columns[6] = UNPINNED, size, waiting, following, start
    columns[7], columns[9] = start + size, NEVER
    _, of_nodes, of_subs, index = range(4)
    bases = np.zeros_like(columns)
    bases[0], bases[5], bases[6:8] = index, np.where(following >= 0, of_subs, 0), of_nodes
    return columns.T.copy(), bases.T.copy()


def _released(sub_cell: Ints, sub_start: Ints, sub_ready: Ints, subs: Ints) -> tuple[Release, ...]:
    found = []
    for cell in sorted(set(sub_cell[subs].tolist())):
        own = subs[sub_cell[subs] == cell]
        counts = sub_ready[own]
        ranks = np.repeat(np.arange(len(own)), counts)
        first = np.cumsum(counts) - counts
        found.append(Release(cell, own, sub_start[own][ranks] + np.arange(len(ranks)) - first[ranks], ranks))
    return tuple(found)


def _check_wires(layout: Layout, cells: Ints, is_wire: NDArray[np.bool_], sources: Ints, outputs: Ints) -> None:
    """Every wire leads from an output that exists to an input of its signature."""
    nodes, inputs = np.nonzero(is_wire)
    src, out = sources[nodes, inputs], outputs[nodes, inputs]
    if src.size and src.max() >= len(cells):
        raise InvalidInputError(f"a cell is wired to node {src.max()}: there are {len(cells)} nodes")
    fits = layout.output_banks[cells[src], out] == layout.input_banks[cells[nodes], inputs]
    if not fits.all():
        at = int(np.argmin(fits))
        node, source = layout.cells[cells[nodes[at]]], layout.cells[cells[src[at]]]
        port = node.inputs[int(inputs[at])]
        given = source.outputs[int(out[at])] if out[at] < len(source.outputs) else None
        got = "an output it does not have" if given is None else f"{given.name!r} with rows {given.signature}"
        raise InvalidInputError(f"{node.name}.{port.name} takes rows {port.signature}, but {source.name} gives {got}")


def _place_outputs(layout: Layout, cells: Ints, owner: Ints, num_constants: list[int]) -> tuple[Ints, tuple[int, ...]]:
    """Rows of the nodes' outputs [n, num_outputs], and how many rows each bank needs with the constants.

    A node has the rows of its owner, an earlier node of its subgraph, or rows of its own.
    """
    banks = layout.output_banks[cells]
    banks[owner != np.arange(len(cells))] = layout.none
    rows = np.zeros_like(banks)
    num_rows = list(num_constants)
    for bank, first in enumerate(num_constants):
        own = banks == bank
        count = int(np.count_nonzero(own))
        rows[own] = np.arange(first, first + count)
        num_rows[bank] += count
    return rows[owner], tuple(num_rows)


def _carry(
    start: int, end: int, sources: Ints, outputs: Ints, is_wire: NDArray[np.bool_], out_rows: Ints
) -> tuple[int, ...] | None:
    """Which inputs a chain carries along, if nodes ``start`` to ``end`` are one: each fed by the one before alone."""
    if end - start == 1:
        return ()
    before = np.arange(start, end - 1)[:, None]
    feeds = is_wire[start + 1 : end]
    if not (
        (sources[start + 1 : end] == before)[feeds].all()
        and (feeds == feeds[0]).all()
        and feeds[0].any()
        and (outputs[start + 1 : end] == outputs[start + 1])[feeds].all()
        and (out_rows[start:end] == out_rows[start]).all()
    ):
        return None
    return tuple(np.where(feeds[0], outputs[start + 1], -1).tolist())


def _kinds(
    cells: Ints, sub_cells: Ints, sub_carry: tuple[tuple[int, ...] | None, ...], waiting: Ints, sub_next: Ints
) -> tuple[Kind, ...]:
    joining = set(cells[waiting > 1].tolist())
    awaited = set(sub_cells[sub_next >= 0].tolist())
    carries: dict[int, set[tuple[int, ...] | None]] = {}
    for cell, carry in zip(sub_cells.tolist(), sub_carry, strict=True):
        carries.setdefault(cell, set()).add(carry)
    return tuple(Kind(cell, tuple(found), cell in joining, cell in awaited) for cell, found in sorted(carries.items()))
