"""The structure of a cell graph as one run of numbers: what plans are found by, and what they are made of.

All are int64, so ``plan.cpp`` reads the same bytes in place:

    nodes, results, must_connect, parts, ranges
    first node, one above the last                                     of each range of nodes that give results
    cell, size, num_each, num_carried, num_first, num_wired            of each part: nodes added at once
      input, first row of its constants                                num_each times
      input, output of the node before                                 num_carried times
      input, code of the first node                                    num_first times
      input, output, ``size`` nodes that feed it                       num_wired times; output -1: codes, not nodes
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack_from
from typing import TypeAlias

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_batchmaker.plan.layout import Layout

Pair: TypeAlias = tuple[int, int]
# Source of a node's input: 0 is zeros, 1 + node * num_outputs + output a wire, -1 - row a constant of the bank.
Codes: TypeAlias = NDArray[np.int64]
CODES = -1  # instead of the output of a wire


def pack_part(
    cell: int,
    size: int,
    *,
    each: Sequence[Pair] = (),
    carried: Sequence[Pair] = (),
    first: Sequence[Pair] = (),
    wired: Sequence[tuple[int, int, bytes]] = (),
) -> bytes:
    """Pack nodes added at once; arguments in the order of the module's table, ``wired`` (input, output, nodes)."""
    pairs = [number for pair in (*each, *carried, *first) for number in pair]
    head = pack(f"{6 + len(pairs)}q", cell, size, len(each), len(carried), len(first), len(wired), *pairs)
    if not wired:
        return head
    return b"".join([head, *(part for index, output, nodes in wired for part in (pack("2q", index, output), nodes))])


def pack_structure(num_nodes: int, parts: Sequence[bytes], ranges: Sequence[Pair], *, must_connect: bool) -> bytes:
    """Pack a whole graph into bytes.

    Args:
        num_nodes: nodes of all parts.
        parts: results of :func:`pack_part`.
        ranges: (first node, one above the last) of nodes that give results, in the order asked for.
        must_connect: all nodes hang together.
    """
    num_results = sum([stop - first for first, stop in ranges])
    numbers = [number for pair in ranges for number in pair]
    head = pack(f"{5 + len(numbers)}q", num_nodes, num_results, must_connect, len(parts), len(ranges), *numbers)
    return b"".join([head, *parts])


def sizes_of(structure: bytes) -> tuple[int, int, bool]:
    """Return the number of nodes and of results, and whether all must hang together."""
    num_nodes, num_results, must_connect = unpack_from("3q", structure)
    return num_nodes, num_results, bool(must_connect)


def expand(layout: Layout, structure: bytes) -> tuple[NDArray[np.int64], Codes, NDArray[np.int64]]:
    """Return cells [n], codes [n, num_inputs], and the nodes that give results, in the order asked for.

    Raises:
        InvalidInputError: a wire comes from a node that there is not.
    """
    numbers = np.frombuffer(structure, dtype=np.int64)
    num_nodes, _, _, num_parts, num_ranges = numbers[:5].tolist()
    at = 5 + 2 * num_ranges
    ranges = numbers[5:at].reshape(-1, 2).tolist()
    results = np.array([node for first, stop in ranges for node in range(first, stop)], dtype=np.int64)
    cells = np.empty(num_nodes, dtype=np.int64)
    codes = np.zeros((num_nodes, layout.num_inputs), dtype=np.int64)
    start = 0
    for _ in range(num_parts):
        cell, size, num_each, num_carried, num_first, num_wired = numbers[at : at + 6].tolist()
        at += 6
        cells[start : start + size] = cell
        own = codes[start : start + size]
        pairs = numbers[at : at + 2 * (num_each + num_carried + num_first)].reshape(-1, 2).tolist()
        at += 2 * len(pairs)
        for index, row in pairs[:num_each]:
            own[:, index] = -1 - np.arange(row, row + size)
        before = np.arange(start, start + size - 1) * layout.num_outputs
        for index, output in pairs[num_each : num_each + num_carried]:
            own[1:, index] = before + (1 + output)
        for index, code in pairs[num_each + num_carried :]:
            own[0, index] = code
        for _ in range(num_wired):
            index, output = numbers[at : at + 2].tolist()
            nodes = numbers[at + 2 : at + 2 + size]
            at += 2 + size
            if output != CODES:
                require_nodes(nodes, num_nodes)
            own[:, index] = nodes if output == CODES else 1 + nodes * layout.num_outputs + output
        start += size
    return cells, codes, results


def require_nodes(nodes: NDArray[np.int64], count: int) -> None:
    """Check that all ``nodes`` are numbers of nodes.

    Raises:
        InvalidInputError: there are ``count``, and some are others.
    """
    wrong = nodes[(nodes < 0) | (nodes >= count)]
    if len(wrong):
        raise InvalidInputError(f"a cell is wired to node {wrong[0]}: there are {count} nodes")
