"""Blocks of numbers."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_batchmaker.scheduling.blocks import Blocks


@settings(max_examples=80, deadline=None)
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
