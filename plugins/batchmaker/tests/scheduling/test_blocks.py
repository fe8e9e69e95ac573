"""Blocks of numbers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_batchmaker.scheduling.blocks import Blocks, Room


@settings(max_examples=80)
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


@settings(max_examples=120)
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
