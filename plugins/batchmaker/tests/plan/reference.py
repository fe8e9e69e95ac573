"""Planning in NumPy and Python: the oracle of ``plan.cpp``."""

from __future__ import annotations

import numpy as np
from mlsys_batchmaker.plan.checks import check_structure
from mlsys_batchmaker.plan.layout import Layout
from mlsys_batchmaker.plan.plan import (
    CELL,
    COLUMNS,
    END,
    FOLLOWING,
    NEVER,
    NEXT,
    PINNED,
    READY,
    REQUEST,
    SLOT,
    START,
    STOP,
    SUB,
    SUB_COLUMNS,
    UNFINISHED,
    UNPINNED,
    UNSUBMITTED,
    WAITING,
    GraphPlan,
    Ints,
    Kind,
)
from mlsys_batchmaker.plan.structure import expand
from numpy.typing import NDArray

from .subgraphs import Groups, group


def make_plan(layout: Layout, structure: bytes) -> GraphPlan:
    """Check a structure and plan it.

    Args:
        layout: layout of the model.
        structure: see :mod:`mlsys_batchmaker.plan.structure`.

    Raises:
        InvalidInputError: there is a cycle, nodes are not connected, or a wire does not fit.
    """
    check_structure(layout, structure)
    cells, codes, results = expand(layout, structure)
    is_wire = codes > 0
    sources = np.where(is_wire, (codes - 1) // layout.num_outputs, -1)  # [n, inputs] node
    outputs = (codes - 1) % layout.num_outputs
    in_banks = np.where(codes == 0, layout.none, layout.input_banks[cells])
    groups = group(cells.tolist(), sources.tolist())
    order, following, owner = np.array(groups.order), np.array(groups.next), np.array(groups.owner)
    planned = np.empty_like(order)  # node of the graph -> node of the plan
    planned[order] = np.arange(len(order))

    is_wire, outputs, codes = is_wire[order], outputs[order], codes[order]
    cells, in_banks = cells[order], in_banks[order]
    sources = np.where(is_wire, planned[sources[order]], -1)
    own_banks = np.where(codes < 0, in_banks, -1)
    num_constants = [int((-codes[own_banks == bank]).max(initial=0)) for bank in range(layout.none)]
    out_rows, num_rows = _output_rows(layout, cells, owner, num_constants)
    in_rows = np.where(codes < 0, -1 - codes, 0)
    in_rows[is_wire] = out_rows[sources[is_wire], outputs[is_wire]]
    slots = np.full(len(order), -1)
    slots[planned[results]] = np.arange(len(results))
    sub_start = np.array(groups.sub_start)
    ends = np.append(sub_start[1:], len(order))
    none, of_nodes, of_subs, of_slots = range(layout.none, layout.none + 4)
    first_output = COLUMNS + layout.num_inputs
    nodes = np.empty((len(order), first_output + layout.num_outputs), dtype=np.int64)
    node_bases = np.empty_like(nodes)
    nodes[:, SUB], node_bases[:, SUB] = np.repeat(np.arange(len(ends)), ends - sub_start), of_subs
    nodes[:, NEXT], node_bases[:, NEXT] = following, np.where(following >= 0, of_nodes, none)
    nodes[:, SLOT], node_bases[:, SLOT] = slots, np.where(slots >= 0, of_slots, none)
    nodes[:, COLUMNS:first_output], node_bases[:, COLUMNS:first_output] = in_rows, in_banks
    nodes[:, first_output:], node_bases[:, first_output:] = out_rows, layout.output_banks[cells]
    subs, sub_bases = _sub_columns(groups, ends, cells[sub_start])
    waiting = np.array(groups.waiting)
    asked = np.stack([planned[results], slots[planned[results]], nodes[planned[results], SUB], cells[planned[results]]])
    arrays = nodes, node_bases, waiting, subs, sub_bases, order, asked
    kinds = (
        Kind(
            cell,
            _carry(start, end, sources, outputs, is_wire, out_rows),
            bool((waiting[start:end] > 1).any()),
            is_awaited,
        )
        for start, end, cell, is_awaited in zip(
            groups.sub_start, ends.tolist(), subs[:, CELL].tolist(), (subs[:, FOLLOWING] >= 0).tolist(), strict=True
        )
    )
    return GraphPlan(
        np.concatenate([each.reshape(-1) for each in arrays]),
        num_nodes=len(order),
        num_columns=nodes.shape[1],
        num_subgraphs=len(subs),
        num_slots=len(results),
        num_rows=num_rows,
        kinds=tuple(dict.fromkeys(kinds)),
        more=tuple(groups.more),
        sub_more=tuple(groups.sub_more),
        result_cell=int(asked[3][0]) if len(set(asked[3].tolist())) == 1 else None,
    )


def _sub_columns(groups: Groups, ends: Ints, cells: Ints) -> tuple[Ints, Ints]:
    """Return ``GraphPlan.subs`` and ``GraphPlan.sub_bases``."""
    start, following = np.array(groups.sub_start), np.array(groups.sub_next)
    subs = np.zeros((len(ends), SUB_COLUMNS), dtype=np.int64)
    subs[:, PINNED], subs[:, STOP], subs[:, CELL], subs[:, READY] = UNPINNED, NEVER, cells, groups.sub_ready
    subs[:, UNSUBMITTED] = subs[:, UNFINISHED] = ends - start
    subs[:, WAITING], subs[:, FOLLOWING], subs[:, START], subs[:, END] = groups.sub_waiting, following, start, ends
    _, of_nodes, of_subs, index = range(4)
    bases = np.zeros_like(subs)
    bases[:, REQUEST], bases[:, START], bases[:, END] = index, of_nodes, of_nodes
    bases[:, FOLLOWING] = np.where(following >= 0, of_subs, 0)
    return subs, bases


def _output_rows(layout: Layout, cells: Ints, owner: Ints, num_constants: list[int]) -> tuple[Ints, tuple[int, ...]]:
    """Return rows of the nodes' outputs [n, num_outputs], and the rows that each bank needs with the constants.

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
    """Return the inputs that nodes ``start`` to ``end`` carry along; None if they are no chain."""
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
