"""The arithmetic behind the policies: when splitting pays, and how inputs are clustered. Pure functions.

All weigh seconds of waiting, summed over requests; a decision must gain ``HYSTERESIS`` of what is at stake, as measured
times are a few percent off.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from mlsys_dvabatch.scheduling.costs import StageCosts, remaining_s

HYSTERESIS = 0.05


def halves_literally(costs: StageCosts, stage: int, num: int, length: int = 1) -> bool:
    """Return whether T_remain of ``num`` is at least twice its half's: Policy II to the letter (section 7.2)."""
    return num > 1 and remaining_s(costs, stage, num, length) >= 2 * remaining_s(costs, stage, num // 2, length)


def sizes_by_cost(costs: StageCosts, stage: int, num: int, *, num_behind: float, length: int = 1) -> list[int]:
    """Return the best sizes to split a batch of ``num`` into before ``stage``, by repeated halving.

    Halves that run one after another let the first finish early, and cost throughput where a batch is cheaper than its
    parts, which the ``num_behind`` requests behind it pay for. That a batch may still be split after a later stage is
    taken into account.
    """
    return list(_plan(costs, stage, num, _rounded(num_behind), length)[0])


def planned_split(costs: StageCosts, stage: int, num: int, num_behind: int, length: int = 1) -> tuple[float, float]:
    """Return the summed waiting and the work of ``num`` requests from ``stage`` on, in seconds, if split best."""
    _, waiting_s, work_s = _plan(costs, stage, num, num_behind, length)
    return waiting_s, work_s


@lru_cache(maxsize=1 << 16)
def _plan(
    costs: StageCosts, stage: int, num: int, num_behind: int, length: int
) -> tuple[tuple[int, ...], float, float]:
    """Return the best sizes before ``stage``, the summed waiting of these requests, and the work, in seconds."""
    waiting_s = work_s = 0.0
    if stage < costs.num_stages:
        stage_s = costs.stage_s(stage, num, length)
        _, later_waiting_s, later_s = _plan(costs, stage + 1, num, num_behind, length)
        waiting_s, work_s = num * stage_s + later_waiting_s, stage_s + later_s
    first, second = (num + 1) // 2, num // 2
    if not second or stage >= costs.num_stages:
        return (num,), waiting_s, work_s
    sizes, first_waiting_s, first_s = _plan(costs, stage, first, _rounded(num_behind + second), length)
    more, second_waiting_s, second_s = _plan(costs, stage, second, num_behind, length)
    halved_waiting_s = first_waiting_s + second * first_s + second_waiting_s
    halved_s = first_s + second_s
    whole, halved = waiting_s + num_behind * work_s, halved_waiting_s + num_behind * halved_s
    if whole - halved > HYSTERESIS * num * work_s:
        return (*sizes, *more), halved_waiting_s, halved_s
    return (num,), waiting_s, work_s


def _rounded(num: float) -> int:
    """Round ``num`` down to four leading bits: decisions need no more, and few numbers are cached."""
    whole = int(num)
    shift = max(0, whole.bit_length() - 4)
    return whole >> shift << shift


BatchCost = Callable[[int, int, int], float]  # requests, units of the longest, units in all -> seconds


def cluster(
    batch_s: BatchCost, lengths: Sequence[int], *, num_behind: float = 0.0, max_units: float = math.inf
) -> list[list[int]]:
    """Group the positions of ``lengths`` into the batches with the least total waiting.

    The batches run one after another, short requests first; every batch is paid for by its own requests, by those of
    the batches after it, and by the ``num_behind`` that come later. Of the sorted lengths an optimal partition is made
    of intervals: dynamic programming over them. A batch has ``max_units`` at most, unless one request alone has more.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    num = len(order)
    units = [0, *accumulate(lengths[position] for position in order)]
    best: list[tuple[float, int]] = [(0.0, 0)]  # for the first n: summed waiting, start of their last batch
    for end in range(1, num + 1):
        longest = lengths[order[end - 1]]
        first = min(bisect_left(units, units[end] - max_units), end - 1)
        best.append(
            min(
                (
                    best[begin][0]
                    + batch_s(end - begin, longest, units[end] - units[begin]) * (num - begin + num_behind),
                    begin,
                )
                for begin in range(first, end)
            )
        )
    batches: list[list[int]] = []
    end = num
    while end:
        begin = best[end][1]
        batches.append(order[begin:end])
        end = begin
    batches.reverse()
    return batches


def cluster_by_bounds(lengths: Sequence[int], bounds: Sequence[int]) -> list[list[int]]:
    """Group the positions of ``lengths`` by the first bound that holds them, shortest first; the rest is one group."""
    clusters: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        slot = next((slot for slot, bound in enumerate(bounds) if length <= bound), len(bounds))
        clusters.setdefault(slot, []).append(position)
    return [clusters[slot] for slot in sorted(clusters)]
