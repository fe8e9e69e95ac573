"""Room for requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from mlsys_batchmaker.scheduling.admission import Room
from mlsys_core.memory import RunPool


@given(acts=st.lists(st.tuples(st.booleans(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1, 4])), max_size=60))
def test_a_room_gives_no_number_twice_and_whatever_fits_the_empty_one(acts: list[tuple[bool, int, int]]):
    room = Room([RunPool(first=1, capacity=25), RunPool(), RunPool(capacity=16)])
    held: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for takes, rows, slots in acts:
        sizes = (rows, 2 * rows, slots)
        if takes:
            starts = room.take(sizes)
            if starts is not None:
                held.append((sizes, starts))
            else:
                assert held  # any of these fits into an empty room
        elif held:
            room.give_back(*held.pop(rows % len(held)))
        assert room.num_held == len(held)
        for kind in range(3):
            numbers = [at for sizes, starts in held for at in range(starts[kind], starts[kind] + sizes[kind])]
            assert len(numbers) == len(set(numbers))
    for each in held:
        room.give_back(*each)
    assert room.take((16, 1, 16)) is not None


def test_a_room_that_lacks_one_kind_takes_of_none():
    kinds = [RunPool(capacity=8), RunPool(capacity=2)]
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
