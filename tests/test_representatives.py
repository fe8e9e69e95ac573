"""A few cases of a grid stand for all: every pair of values is among them where there is room."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.representatives import representatives, values_by_axis

GRIDS = st.lists(st.integers(1, 5), min_size=2, max_size=4).map(
    lambda sizes: [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]
)


def pairs_of(cases):
    return {pair for case in cases for pair in combinations(sorted(case.items()), 2)}


@given(GRIDS)
def test_every_pair_is_covered_where_there_is_room(cases):
    chosen = representatives(cases, len(cases) - 1) if len(cases) > 1 else [0]
    room_was_enough = len(chosen) < len(cases) - 1 or len(cases) == 1
    assert not room_was_enough or pairs_of(cases[index] for index in chosen) == pairs_of(cases)


@given(GRIDS, st.integers(1, 30))
def test_there_are_never_more_than_asked_for_and_none_twice(cases, most):
    chosen = representatives(cases, most)
    assert len(chosen) <= max(most, 0)
    assert len(set(chosen)) == len(chosen)
    assert all(0 <= index < len(cases) for index in chosen)


def test_a_single_parameter_is_taken_from_end_to_end():
    assert representatives([{"a": number} for number in range(9)], 3) == [0, 4, 8]
    assert representatives([{"a": number} for number in range(9)], 1) == [0]


def test_a_grid_of_three_by_three_by_three_needs_nine():
    cases = [{"a": a, "b": b, "c": c} for a, b, c in product(range(3), repeat=3)]
    chosen = representatives(cases, 24)
    assert pairs_of(cases[index] for index in chosen) == pairs_of(cases)
    assert len(chosen) < 13


@pytest.fixture(params=["x", "y"])
def letter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("number", [3, 4])
@pytest.mark.parametrize(("flag", "items"), [(True, ["a"]), (False, ["a"])])
def test_arguments_given_together_are_one_axis(number, flag, items, letter, request: pytest.FixtureRequest):
    values = values_by_axis(request.node)
    assert sorted(values) == ["flag,items", "letter", "number"]
    assert values["number"] == ((int, number),)
    assert values["letter"] == ((str, letter),)
    assert values["flag,items"] == ((bool, flag), id(items))
