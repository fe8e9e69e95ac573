"""Memory plans for schedules on several streams, in which no single order of steps describes the lifetimes.

The twin of :mod:`mlsys_core.memory.plan`, over the same search. The caller says which pairs of tensors may be alive
together, from the happens-before order that its streams and events enforce.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlsys_core.errors import InvalidInputError
from mlsys_core.memory.placement import Rows, Units, greedy_orders, search
from mlsys_core.memory.plan import MemoryPlan, as_integer, make_plan, to_units

CLIQUE_STARTS = 10  # tensors from which the lower bound grows cliques


def plan_offsets_for_conflicts(nbytes: Sequence[int], conflicts: Sequence[int], *, alignment: int = 64) -> MemoryPlan:
    """Place tensors when no single order of steps says which of them are alive together.

    For schedules on several streams: two tensors may share space only if one is dead before the other is born in
    *every* run that the synchronisation allows. The same search as :func:`mlsys_core.memory.plan.plan_offsets`.

    Args:
        nbytes: size per tensor, 0 or more.
        conflicts: one bitset per tensor; bit ``j`` of ``conflicts[i]`` is set if tensors ``i`` and ``j`` must not share
            space. Symmetric; bit ``i`` of ``conflicts[i]`` does not matter.
        alignment: offsets are multiples of it, sizes count rounded up to it; bytes, a power of two.

    Returns:
        The plan. ``lower_bound_nbytes`` is the heaviest set of mutually conflicting tensors that a greedy search finds:
        a true bound, though not always the largest.

    Raises:
        InvalidInputError: lengths differ, a size is negative, a bitset names a tensor that is not there or is not
            symmetric, or ``alignment`` is not a power of two.

    Example:
        >>> plan_offsets_for_conflicts([64, 64, 64], [0b010, 0b101, 0b010]).offsets  # 0 and 2 never meet
        (64, 0, 64)
    """
    if len(nbytes) != len(conflicts):
        raise InvalidInputError(f"got {len(nbytes)} sizes and {len(conflicts)} bitsets: give one bitset per tensor")
    nbytes = [as_integer(size, f"nbytes[{i}]") for i, size in enumerate(nbytes)]
    for i, size in enumerate(nbytes):
        if size < 0:
            raise InvalidInputError(f"nbytes[{i}] is {size}: a size in bytes is 0 or more")
    sizes, kept = to_units(nbytes, alignment)
    bits = _packed([as_integer(bitset, f"conflicts[{i}]") for i, bitset in enumerate(conflicts)])
    if not kept:
        return make_plan(nbytes, alignment, kept, [], 0)

    def conflicting(k: int) -> npt.NDArray[np.bool_]:
        bools = np.unpackbits(bits[kept[k]], count=len(nbytes), bitorder="little").view(np.bool_)
        return bools if len(kept) == len(nbytes) else bools[kept]

    degrees, weights = np.zeros(len(kept), np.int64), sizes.copy()
    for k in range(len(kept)):
        row = conflicting(k)
        degrees[k] = np.count_nonzero(row)
        weights[k] += sizes[row].sum()
    lower_bound = _clique_bound(sizes, conflicting, weights)
    offsets = search(sizes, conflicting, greedy_orders(sizes, degrees), lower_bound)
    return make_plan(nbytes, alignment, kept, offsets.tolist(), lower_bound)


def _packed(conflicts: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Return the checked bitsets as ``uint8[n, ceil(n / 8)]``."""
    n = len(conflicts)
    width = -(-n // 8)
    for i, bitset in enumerate(conflicts):
        if not 0 <= bitset < 1 << n:
            raise InvalidInputError(
                f"conflicts[{i}] names a tensor that is not there: use bits 0 to {n - 1} of an int that is 0 or more"
            )
    joined = b"".join(bitset.to_bytes(width, "little") for bitset in conflicts)
    bits = np.frombuffer(joined, np.uint8).reshape(n, width)
    for begin in range(0, n, 1024):  # a block of rows against the same block of columns: 1024 n bytes, not n squared
        block = np.unpackbits(bits[begin : begin + 1024], axis=1, count=n, bitorder="little")
        columns = np.packbits(block.T, axis=1, bitorder="little")
        differs = (bits[:, begin // 8 : begin // 8 + columns.shape[1]] != columns).any(axis=1)
        if differs.any():
            i = int(differs.argmax())
            raise InvalidInputError(
                f"conflicts is not symmetric at tensor {i}: bit j of conflicts[{i}] and bit {i} of conflicts[j] "
                f"must be the same for every j"
            )
    return bits


def _clique_bound(sizes: Units, row: Rows, weights: Units) -> int:
    """Return the units of the heaviest clique that greedy growth finds, from the heaviest neighbourhoods.

    ``weights[k]`` is at least the weight of any clique with tensor ``k``: those that cannot beat the best are skipped.
    """
    starts = np.argsort(-weights, kind="stable")[:CLIQUE_STARTS].tolist()
    best = 0
    for preference in (
        sizes.astype(float) * weights,
        weights,
        sizes,
    ):  # each fails on some family, together they do well
        preferred = np.argsort(-preference, kind="stable")
        for k in starts:
            if weights[k] <= best:
                break
            weight, grown, candidates = 0, k, preferred
            while True:
                weight += int(sizes[grown])
                candidates = candidates[row(grown)[candidates]]
                candidates = candidates[candidates != grown]
                if not candidates.size:
                    break
                grown = int(candidates[0])
            best = max(best, weight)
    return best
