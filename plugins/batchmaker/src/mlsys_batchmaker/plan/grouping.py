"""Grouping the nodes of a structure: compiled, or :mod:`mlsys_batchmaker.plan.subgraphs` where there is no compiler."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from mlsys_core.config import settings
from mlsys_core.errors import MissingDependencyError
from mlsys_core.native import load_kernel
from numpy.typing import NDArray

from mlsys_batchmaker.plan.subgraphs import group

Ints = NDArray[np.int64]
Pairs: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class GroupArrays:
    """As :class:`mlsys_batchmaker.plan.subgraphs.Groups`."""

    order: Ints
    next: Ints
    waiting: Ints
    owner: Ints
    sub_start: Ints
    sub_ready: Ints
    sub_waiting: Ints
    sub_next: Ints
    more: Pairs
    sub_more: Pairs


def group_nodes(cells: Ints, sources: Ints, gives: NDArray[np.bool_], *, must_connect: bool = True) -> GroupArrays:
    """Order the nodes and group them.

    Args:
        cells: [n] the cell of each node.
        sources: [n, inputs] the node that feeds each input, or -1.
        gives: [n] whether a node gives a result.
        must_connect: all nodes hang together.

    Raises:
        InvalidInputError: there is a cycle, or nodes that are not connected with the rest.
    """
    try:
        library = _load()
    except MissingDependencyError:
        return _in_python(cells, sources, gives, must_connect)
    count, inputs = sources.shape
    by_node, by_sub = np.empty((4, count), dtype=np.int64), np.empty((4, count), dtype=np.int64)
    pairs = np.empty((2, count * inputs, 2), dtype=np.int64)
    num_pairs = np.zeros(2, dtype=np.int64)
    given = [np.ascontiguousarray(each) for each in (cells, sources, gives)]
    arrays = [*given, *by_node, *by_sub, *pairs, num_pairs]
    subs = library.batchmaker_group(count, inputs, must_connect, *(each.ctypes.data for each in arrays))
    if subs < 0:
        _in_python(cells, sources, gives, must_connect)  # raises, and says what is wrong
        raise AssertionError(f"group.cpp found problem {subs} where subgraphs.py finds none")
    more, sub_more = (
        tuple((first, second) for first, second in each[:number].tolist())
        for each, number in zip(pairs, num_pairs.tolist(), strict=True)
    )
    return _arrays([*by_node, *by_sub[:, :subs]], more, sub_more)


def _in_python(cells: Ints, sources: Ints, gives: NDArray[np.bool_], must_connect: bool) -> GroupArrays:
    results = set(np.flatnonzero(gives).tolist())
    groups = group(cells.tolist(), sources.tolist(), results, must_connect=must_connect)
    names = ("order", "next", "waiting", "owner", "sub_start", "sub_ready", "sub_waiting", "sub_next")
    arrays = [np.array(getattr(groups, name), dtype=np.int64) for name in names]
    return _arrays(arrays, tuple(groups.more), tuple(groups.sub_more))


def _arrays(arrays: list[Ints], more: Pairs, sub_more: Pairs) -> GroupArrays:
    order, following, waiting, owner, sub_start, sub_ready, sub_waiting, sub_next = arrays
    return GroupArrays(
        order, following, waiting, owner, sub_start, sub_ready, sub_waiting, sub_next, more=more, sub_more=sub_more
    )


@cache
def _load() -> Any:
    library = load_kernel(Path(__file__).with_name("group.cpp"), cache_dir=settings().cache_dir)
    library.batchmaker_group.restype = ctypes.c_int64
    library.batchmaker_group.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_void_p] * 14
    return library
