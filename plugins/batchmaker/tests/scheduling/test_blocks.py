"""Blocks of numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_batchmaker.scheduling.blocks import Blocks, Room
from mlsys_core.errors import InvalidInputError


@given(acts=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60), bounded=st.booleans())
def test_blocks_never_overlap(acts: list[tuple[bool, int]], bounded: bool):
    blocks = Blocks(first=1, capacity=40 if bounded else None)
    held: list[tuple[int, int]] = []
    for takes, size in acts:
        if takes:
            start = blocks.take(size)
            if start is not None:
                held.append((start, size))
        elif held:
            blocks.give_back(*held.pop(size % len(held)))
        numbers = [number for start, count in held for number in range(start, start + count)]
        assert len(numbers) == len(set(numbers))
        assert all(1 <= number < (40 if bounded else blocks.top) for number in numbers)
    for block in held:
        blocks.give_back(*block)
    assert blocks.num_used == 0
    assert blocks.take(16) == 1


@given(acts=st.lists(st.tuples(st.booleans(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1, 4])), max_size=60))
def test_a_room_gives_no_number_twice_and_whatever_fits_the_empty_one(acts: list[tuple[bool, int, int]]):
    room = Room([Blocks(first=1, capacity=25), Blocks(), Blocks(capacity=16)])
    held: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for takes, rows, slots in acts:
        sizes = (rows, 2 * rows, slots)
        if takes:
            starts = room.take(sizes)
            if starts is not None:
                held.append((sizes, starts))
            else:
                assert held  # an empty room has place for any of these
        elif held:
            room.give_back(*held.pop(rows % len(held)))
        assert room.num_held == len(held)
        for kind in range(3):
            numbers = [at for sizes, starts in held for at in range(starts[kind], starts[kind] + sizes[kind])]
            assert len(numbers) == len(set(numbers))
    for each in held:
        room.give_back(*each)
    assert room.take((16, 1, 16)) is not None


def test_blocks_are_powers_of_two_that_begin_with_the_first_number():
    blocks = Blocks(first=3)
    assert [blocks.take(count) for count in (1, 2, 3, 5, 8, 9)] == [3, 4, 6, 10, 18, 26]
    assert (blocks.top, blocks.num_used) == (42, 1 + 2 + 4 + 8 + 8 + 16)
    assert blocks.take(0) == 3, "none of them needs no place"
    blocks.give_back(3, 0)
    assert blocks.num_used == 39


def test_blocks_are_given_up_to_the_capacity():
    for capacity, count, start in ((9, 8, 1), (9, 9, None), (8, 8, None), (2, 1, 1), (2, 2, None)):
        blocks = Blocks(first=1, capacity=capacity)
        assert blocks.fits(count) == (start is not None)
        assert blocks.take(count) == start
    assert Blocks().fits(10**9)
    for capacity in (0, 1):
        with pytest.raises(InvalidInputError, match=f"no numbers from 1 to {capacity}"):
            Blocks(first=1, capacity=capacity)


def test_what_was_given_back_is_cut_from_the_smallest_that_is_large_enough():
    blocks = Blocks(capacity=32)
    assert [blocks.take(count) for count in (16, 4, 8, 1, 1, 2)] == [0, 16, 20, 28, 29, 30]
    assert blocks.take(1) is None
    blocks.give_back(0, 16)
    blocks.give_back(20, 8)
    assert [blocks.take(2), blocks.take(1), blocks.take(4)] == [20, 22, 24], "of the eight: 2, then 4 and the rest"
    assert blocks.take(16) == 0
    assert blocks.take(2) is None
    assert blocks.take(1) == 23
    assert blocks.num_used == 32
    assert blocks.fits(32)


def test_when_all_is_given_back_no_pattern_of_sizes_is_left():
    blocks = Blocks(first=1, capacity=9)
    singles = [blocks.take(1) for _ in range(8)]
    for start in singles:
        assert start is not None
        blocks.give_back(start, 1)
    assert (blocks.num_used, blocks.top, blocks.take(8)) == (0, 1, 1)


def test_a_room_that_lacks_one_kind_takes_of_none():
    kinds = [Blocks(capacity=8), Blocks(capacity=2)]
    room = Room(kinds)
    assert room.take((4, 2)) == (0, 0)
    assert room.take((4, 1)) is None
    assert ([kind.num_used for kind in kinds], room.num_held) == ([4, 2], 1)
    room.give_back((4, 2), (0, 0))
    assert room.num_held == 0
    assert [kind.num_used for kind in kinds] == [4, 2], "kept as a whole for the next one of these sizes"
    assert room.take((4, 2)) == (0, 0)
    assert room.take((1, 0)) == (4, 0)
    room.give_back((4, 2), (0, 0))
    assert room.take((2, 2)) is not None, "what is kept is taken apart where something is lacking"
    assert room.num_held == 2
