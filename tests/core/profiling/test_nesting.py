from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.profiling.recording import nest

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 15)).map(lambda p: (p[0], p[0] + p[1])), max_size=25)


@settings(max_examples=300)
@given(intervals, st.data())
def test_spans_of_a_lane_nest_or_do_not_overlap(spans: list[tuple[int, int]], data: st.DataObject) -> None:
    of_each = st.lists(st.sampled_from("abc"), min_size=len(spans), max_size=len(spans))
    names = data.draw(st.none() | of_each)
    placements = nest(spans, names=names)
    for (i, left), (j, right) in combinations(enumerate(placements), 2):
        if left.lane == right.lane:
            a, b = spans[i], spans[j]
            apart = a[1] <= b[0] or b[1] <= a[0]
            nested = (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])
            assert apart or (nested and (names is None or names[i] != names[j])), (a, b)
            assert apart or left.depth != right.depth
    for span, placement in zip(spans, placements, strict=True):
        if placement.parent is None:
            assert placement.depth == 0
            continue
        parent = spans[placement.parent]
        assert parent[0] <= span[0] <= span[1] <= parent[1]
        assert placements[placement.parent].lane == placement.lane
        assert placements[placement.parent].depth == placement.depth - 1


@given(st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=3), max_leaves=20))
def test_well_nested_spans_take_one_lane_and_their_true_depth(tree: list) -> None:  # type: ignore[type-arg]
    spans: list[tuple[int, int]] = []
    depths: list[int] = []

    def walk(node: list, depth: int, now: int) -> int:  # type: ignore[type-arg]
        index = len(spans)
        spans.append((now, now))
        depths.append(depth)
        now += 1
        for child in node:
            now = walk(child, depth + 1, now)
        spans[index] = (spans[index][0], now + 1)
        return now + 1

    walk(tree, 0, 0)
    placements = nest(spans)
    assert [placement.lane for placement in placements] == [0] * len(spans)
    assert [placement.depth for placement in placements] == depths


def test_lanes_are_used_again_once_free() -> None:
    lanes = [p.lane for p in nest([(0, 10), (5, 15), (12, 20), (16, 30), (40, 50)])]
    assert lanes == [0, 1, 0, 1, 0]


def test_of_equal_spans_the_first_is_the_parent() -> None:
    assert [p.parent for p in nest([(0, 5), (0, 5), (0, 5)])] == [None, 0, 1]


def test_names_keep_structure_together_where_they_can() -> None:
    spans = [(0, 10), (1, 4), (5, 9), (2, 12), (3, 6)]
    names = ["request", "prefill", "decode", "request", "prefill"]
    assert [(p.lane, p.depth, p.parent) for p in nest(spans, names=names)] == [
        (0, 0, None), (0, 1, 0), (0, 1, 0), (1, 0, None), (1, 1, 3),
    ]  # fmt: skip


def test_many_concurrent_spans_take_moderate_time() -> None:
    spans = [(start, start + 2000) for start in range(20_000)]
    assert max(p.lane for p in nest(spans, names=["request"] * len(spans))) == 1999
