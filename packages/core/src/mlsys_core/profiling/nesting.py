"""Nesting of spans: lanes, depths and parents of the spans of one track.

A thread's own spans nest, but spans of concurrent requests on one named track may overlap partly. Trace viewers refuse
that, so the overlapping ones go to further lanes. Export, summary and timeline all place spans with :func:`place`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mlsys_core.profiling.recording import Span, Track


class Placement(NamedTuple):
    """Position of one span in its track."""

    lane: int  # 0 unless the span partly overlaps another one of its track
    depth: int  # number of spans of the lane around it
    parent: int | None  # index of the innermost span around it in the same lane


def nest(intervals: Sequence[tuple[int, int]], *, names: Sequence[str] | None = None) -> list[Placement]:
    """Place the spans of one track so that any two in a lane either nest or do not overlap.

    Spans are taken by start, the longer first; of equal ones the earlier in ``intervals`` is the parent. A span goes
    into the tightest span around it, else into the lowest lane that is free. O(n log n) for a bounded number of lanes.

    Args:
        intervals: (start, end) of each span, end >= start, in any one unit.
        names: Of each span. If given, spans of the same name never nest: one request is no part of another that
            happens to last longer.

    Returns:
        One placement for each interval, in the order given.

    Example:
        >>> [(p.lane, p.depth) for p in nest([(0, 10), (2, 4), (5, 15)])]
        [(0, 0), (0, 1), (1, 0)]
        >>> [(p.lane, p.depth) for p in nest([(0, 10), (2, 4)], names=["request", "request"])]
        [(0, 0), (1, 0)]
    """
    order = sorted(range(len(intervals)), key=lambda i: (intervals[i][0], -intervals[i][1]))
    placements: list[Placement | None] = [None] * len(intervals)
    open_spans: list[list[int]] = []  # per lane, outermost first: indices of the spans not yet ended
    ends: list[tuple[int, int]] = []  # heap of (end, lane) of all open spans
    innermost: list[tuple[int, int]] = []  # sorted (end, lane) of the innermost open span of each busy lane
    free: list[int] = []  # heap of lanes without an open span
    open_names: Counter[str] = Counter()  # number of lanes with an open span of that name

    def lane_around(index: int) -> int | None:
        if names is not None and open_names[names[index]] == len(innermost):
            return None
        for position in range(bisect_left(innermost, (intervals[index][1], -1)), len(innermost)):
            lane = innermost[position][1]
            if names is None or all(names[other] != names[index] for other in open_spans[lane]):
                return innermost.pop(position)[1]
        return None

    for index in order:
        start, end = intervals[index]
        while ends and ends[0][0] <= start:
            ended, lane = heapq.heappop(ends)
            del innermost[bisect_left(innermost, (ended, lane))]
            left = open_spans[lane].pop()
            if names is not None:
                open_names[names[left]] -= 1
            if open_spans[lane]:
                insort(innermost, (intervals[open_spans[lane][-1]][1], lane))
            else:
                heapq.heappush(free, lane)
        around = lane_around(index)
        if around is not None:
            lane = around
        elif free:
            lane = heapq.heappop(free)
        else:
            lane = len(open_spans)
            open_spans.append([])
        stack = open_spans[lane]
        placements[index] = Placement(lane, len(stack), stack[-1] if stack else None)
        stack.append(index)
        if names is not None:
            open_names[names[index]] += 1
        insort(innermost, (end, lane))
        heapq.heappush(ends, (end, lane))
    return [placement for placement in placements if placement is not None]


def place(track: Track, spans: Sequence[Span]) -> list[Placement]:
    """Place the spans of ``track`` with :func:`nest`; on a named track spans of one name get separate lanes."""
    intervals = [(span.start_ns, span.end_ns) for span in spans]
    return nest(intervals, names=[span.name for span in spans] if track.is_named else None)
