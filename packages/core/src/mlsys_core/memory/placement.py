"""The search below :mod:`mlsys_core.memory.plan`: item sizes and conflicts in, offsets out.

Sizes and offsets here are whole units of alignment. Conflicts come as rows (``row(i)[j]`` is true if items ``i`` and
``j`` must not share space), so that intervals, bitsets and any other source share one placement loop.

Finding the smallest peak is NP-hard (dynamic storage allocation). What carries the search is that placing items at the
lowest offset that fits, in a well chosen order, can produce an optimal plan: take one, sort its items by offset, place
them in that order, and each lands no higher than it was. So this searches orders: a few that are good in general, then
*squeaky wheel optimisation* (Joslin and Clements, 1999) around the item that reaches highest: every item above
the lower bound goes first in the next round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
Rows = Callable[[int], npt.NDArray[np.bool_]]

MAX_WORK = 90_000  # placements of one item among few, over the whole search: a bound that does not depend on the clock
ORDERS_WORK = MAX_WORK // 2  # of it for whole orders; the rest is for repairs
ITEMS_PER_WORK = 10_000  # placing an item costs one unit more for each so many items in the set ...
CONFLICTS_PER_WORK = 1500  # ... and one more for each so many that it conflicts with
CACHED_ROWS = 2048  # up to so many items all rows are kept (4 MiB of bool): each round asks for each of them again
NEAR_ENOUGH = 1.01  # repairs end at this ratio of peak to lower bound
ROUNDS_PER_REPAIR = 200
SHUFFLE_PROBABILITY = 0.3  # chance that a round also swaps two items, to leave a cycle of orders


def place(
    order: Iterable[int],
    sizes: Units,
    row: Rows,
    *,
    best_fit: bool = False,
    limit: int | None = None,
    fixed: tuple[Indices, Units] | None = None,
) -> Units | None:
    """Place items one by one, each in a gap between the conflicting items placed before.

    Args:
        order: the items to place, each once.
        sizes: units per item, ``[n]``, all positive.
        row: ``row(i)`` is ``bool[n]``, the items that conflict with item ``i``.
        best_fit: take the smallest gap that fits instead of the lowest.
        limit: give up as soon as an item reaches it.
        fixed: items that are placed already and their offsets, by offset.

    Returns:
        Offsets in units, ``[n]``, or None if an item reached ``limit``.
    """
    n = len(sizes)
    offsets, tops = np.zeros(n, np.int64), np.zeros(n, np.int64)
    placed = np.empty(n, np.intp)  # the items placed so far, by offset ...
    bottoms = np.empty(n, np.int64)  # ... and their offsets, for the binary search that keeps it so
    covered = np.zeros(n + 1, np.int64)  # scratch: covered[k] is the highest top of the first k conflicting items
    count = 0
    if fixed is not None:
        items, bottom = fixed
        count = len(items)
        placed[:count], bottoms[:count] = items, bottom
        offsets[items], tops[items] = bottom, bottom + sizes[items]
    size_of = sizes.tolist()
    # Nearly all time goes to the few array operations below: take() is twice as quick as indexing by an array.
    for item in order:
        size = size_of[item]
        others = placed[:count]
        live = others.take(row(item).take(others).nonzero()[0])
        offset = 0
        if live.size:
            floor = covered[: live.size + 1]
            np.maximum.accumulate(tops.take(live), out=floor[1:])
            gaps = offsets.take(live) - floor[:-1]
            fits = gaps >= size
            first = int(fits.argmax())
            if not fits[first]:
                offset = int(floor[-1])
            elif best_fit:
                candidates = fits.nonzero()[0]
                offset = int(floor[candidates[gaps[candidates].argmin()]])
            else:
                offset = int(floor[first])
        if limit is not None and offset + size >= limit:
            return None
        at = int(bottoms[:count].searchsorted(offset))
        placed[at + 1 : count + 1] = placed[at:count]
        bottoms[at + 1 : count + 1] = bottoms[at:count]
        placed[at], bottoms[at] = item, offset
        offsets[item], tops[item] = offset, offset + size
        count += 1
    return offsets


def greedy_orders(sizes: Units, degrees: npt.NDArray[np.integer]) -> list[tuple[list[int], bool]]:
    """Return orders that do well on most families, as ``(order, best_fit)``, best first.

    Large sets are tried with these alone.

    Args:
        sizes: units per item, ``[n]``.
        degrees: conflicts per item, ``[n]``.
    """

    def descending(primary: npt.NDArray[np.number], secondary: npt.NDArray[np.number]) -> list[int]:
        order: list[int] = np.lexsort((-secondary, -primary)).tolist()
        return order

    return [
        (descending(sizes, degrees), False),
        (descending(sizes.astype(float) * degrees, sizes), False),
        (descending(degrees, sizes), False),
        (descending(sizes, degrees), True),
    ]


def search(sizes: Units, row: Rows, orders: Iterable[tuple[Sequence[int], bool]], lower_bound: int) -> Units:
    """Return the best plan found within the work allowed; stop early at ``lower_bound``.

    Args:
        sizes: units per item, ``[n]``, all positive; ``n >= 1``.
        row: ``row(i)`` is ``bool[n]``, the items that conflict with item ``i``.
        orders: at least one ``(order, best_fit)`` to try, most promising first. The first is always tried in full.
        lower_bound: units no plan can go below.

    Returns:
        Offsets in units, ``[n]``.
    """
    n = len(sizes)
    if n <= CACHED_ROWS:
        row = [row(i) for i in range(n)].__getitem__
    best: Units | None = None
    peak = None
    work, order_work = 0.0, _work(np.arange(n), row)
    for order, best_fit in orders:
        if work > ORDERS_WORK or peak == lower_bound:
            break
        work += order_work
        offsets = place(order, sizes, row, best_fit=best_fit, limit=peak)
        if offsets is not None:
            best, peak = offsets, int((offsets + sizes).max())
    assert best is not None
    return _repair(best, sizes, row, lower_bound, work=MAX_WORK - work)


def _work(items: Indices, row: Rows) -> float:
    """Return the estimated work of placing ``items`` once, from the conflicts of a sample."""
    sample = items[:: max(1, len(items) // 32)].tolist()
    conflicts = sum(int(np.count_nonzero(row(i))) for i in sample) / len(sample)
    return len(items) * (1 + len(items) / ITEMS_PER_WORK + conflicts / CONFLICTS_PER_WORK)


def _repair(offsets: Units, sizes: Units, row: Rows, lower_bound: int, *, work: float) -> Units:
    """Lower the highest item by re-placing the items around it, until none is left to lower or ``work`` runs out.

    The neighbourhood is two conflicts wide at first, and wider each time that does not help. In a small or dense set it
    is everything at once; in a large sparse one a repair costs little and leaves the rest as it is.
    """
    rng = random.Random(0)  # fixed: the same input gives the same plan
    hops = 2
    while work > 0:
        highest = int((offsets + sizes).argmax())
        if offsets[highest] + sizes[highest] <= lower_bound * NEAR_ENOUGH:
            break
        free = np.zeros(len(sizes), np.bool_)
        free[highest] = True
        for _ in range(hops):
            reach = free.copy()
            for i in free.nonzero()[0].tolist():
                reach |= row(i)
            free, grown_from = reach, free
        lowered, spent = _squeaky_wheel(offsets, free, sizes, row, lower_bound, rng=rng, work=work)
        work -= spent
        if lowered is not None:
            offsets, hops = lowered, 2
        elif (free == grown_from).all():
            break
        else:
            hops += 1
    return offsets


def _squeaky_wheel(
    offsets: Units,
    free: npt.NDArray[np.bool_],
    sizes: Units,
    row: Rows,
    lower_bound: int,
    *,
    rng: random.Random,
    work: float,
) -> tuple[Units | None, float]:
    """Re-place the ``free`` items around the others, round by round, those above the lower bound first.

    Returns:
        Offsets under which the highest free item ends lower, or None; and the work spent.
    """
    near = free.copy()
    for i in free.nonzero()[0].tolist():
        near |= row(i)
    items = near.nonzero()[0]
    round_work = _work(free.nonzero()[0], row)
    if round_work > work:
        return None, work
    sub_free, sub_sizes = free[items], sizes[items]
    sub_rows = {k: row(int(items[k]))[items] for k in sub_free.nonzero()[0].tolist()}
    sub_offsets = offsets[items]
    by_offset = sub_offsets.argsort(kind="stable")
    order = by_offset[sub_free[by_offset]].tolist()
    others = by_offset[~sub_free[by_offset]]
    peak = int((sub_offsets + sub_sizes)[sub_free].max())
    best: Units | None = None
    now = sub_offsets
    spent = 0.0
    for _ in range(ROUNDS_PER_REPAIR):
        if spent + round_work > work or peak <= lower_bound * NEAR_ENOUGH:
            break
        sticks_out = (now + sub_sizes > lower_bound).tolist()
        promoted = [k for k in order if sticks_out[k]] + [k for k in order if not sticks_out[k]]
        if promoted == order or rng.random() < SHUFFLE_PROBABILITY:
            i, j = rng.randrange(len(order)), rng.randrange(len(order))
            promoted[i], promoted[j] = promoted[j], promoted[i]
        order = promoted
        moved = place(order, sub_sizes, sub_rows.__getitem__, fixed=(others, sub_offsets[others]))
        assert moved is not None
        now = moved
        spent += round_work
        top = int((now + sub_sizes)[sub_free].max())
        if top < peak:
            best, peak = now, top
    if best is None:
        return None, spent
    lowered = offsets.copy()
    lowered[items] = best
    return lowered, spent
