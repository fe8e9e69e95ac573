"""Runs of adjacent numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.memory import RunPool


@given(acts=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60), bounded=st.booleans())
def test_runs_never_overlap(acts: list[tuple[bool, int]], bounded: bool):
    runs = RunPool(first=1, capacity=40 if bounded else None)
    held: list[tuple[int, int]] = []
    for takes, size in acts:
        if takes:
            start = runs.take(size)
            if start is not None:
                held.append((start, size))
        elif held:
            runs.give_back(*held.pop(size % len(held)))
        numbers = [number for start, count in held for number in range(start, start + count)]
        assert len(numbers) == len(set(numbers))
        assert all(1 <= number < (40 if bounded else runs.top) for number in numbers)
    for run in held:
        runs.give_back(*run)
    assert runs.num_used == 0
    assert runs.take(16) == 1


def test_runs_are_powers_of_two_that_begin_with_the_first_number():
    runs = RunPool(3)
    assert [runs.take(count) for count in (1, 2, 3, 5, 8, 9)] == [3, 4, 6, 10, 18, 26]
    assert (runs.top, runs.num_used) == (42, 1 + 2 + 4 + 8 + 8 + 16)
    assert runs.take(0) == 3, "no blocks need no room"
    runs.give_back(3, 0)
    assert runs.num_used == 39


def test_runs_are_given_up_to_the_capacity():
    for capacity, count, start in ((9, 8, 1), (9, 9, None), (8, 8, None), (2, 1, 1), (2, 2, None)):
        runs = RunPool(1, capacity=capacity)
        assert runs.fits(count) == (start is not None)
        assert runs.take(count) == start
    assert RunPool().fits(10**9)
    for capacity in (0, 1):
        with pytest.raises(InvalidInputError, match=f"no numbers from 1 to {capacity}"):
            RunPool(1, capacity=capacity)


def test_freed_ranges_are_cut_from_the_smallest_large_enough():
    runs = RunPool(capacity=32)
    assert [runs.take(count) for count in (16, 4, 8, 1, 1, 2)] == [0, 16, 20, 28, 29, 30]
    assert runs.take(1) is None
    runs.give_back(0, 16)
    runs.give_back(20, 8)
    assert [runs.take(2), runs.take(1), runs.take(4)] == [20, 22, 24], "of the eight: 2, then 4 and the rest"
    assert runs.take(16) == 0
    assert runs.take(2) is None
    assert runs.take(1) == 23
    assert runs.num_used == 32
    assert runs.fits(32)


def test_when_all_is_given_back_no_pattern_of_sizes_is_left():
    runs = RunPool(1, capacity=9)
    singles = [runs.take(1) for _ in range(8)]
    for start in singles:
        assert start is not None
        runs.give_back(start, 1)
    assert (runs.num_used, runs.top, runs.take(8)) == (0, 1, 1)
