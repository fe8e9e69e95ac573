"""Memory pools by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.config import read_settings
from mlsys_core.errors import InvalidInputError, MemoryPlanError, PluginError
from mlsys_core.memory import BlockId, BlockPool, OutOfBlocksError, RunPool, find_pool
from mlsys_core.plugins import load_plugins
from mlsys_core.plugins.specs import MemoryPoolSpec


def test_the_cores_own_are_the_defaults() -> None:
    assert isinstance(find_pool(None, "blocks")(4), BlockPool)
    assert isinstance(find_pool(None, "runs")(1, 9), RunPool)


def test_an_unknown_name_and_a_pool_of_the_other_kind_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no memory pool is called 'blok'; did you mean 'block'"):
        find_pool("blok", "blocks")
    with pytest.raises(InvalidInputError, match="'run' hands out runs; this takes pools of blocks: block"):
        find_pool("run", "blocks")


def test_a_plugins_pool_that_fails_is_named_with_its_owner() -> None:
    registry = load_plugins(read_settings({}), entry_points=[]).registry
    registry.add(MemoryPoolSpec(name="bad", kind="blocks", help="x", factory="math:sqrt"), "mlsys-test")
    with pytest.raises(PluginError, match="memory pool 'bad' of mlsys-test failed"):
        find_pool("bad", "blocks", registry)("four")


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 of 4 are free") as caught:
        pool.allocate(2)
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    assert isinstance(caught.value, MemoryPlanError)
    assert pool.num_free == 1
    assert {*held, *pool.allocate(1)} == {0, 1, 2, 3}


@pytest.mark.parametrize("block", [-1, 3, 1000])
def test_a_block_of_another_pool_is_refused(block: int) -> None:
    pool = BlockPool(3)
    held = pool.allocate(3)  # so that -1, read as an index from the end, would be a held block
    for use in (pool.release, pool.retain):
        with pytest.raises(MemoryPlanError, match=f"block {block} .*not of this pool: its ids are 0 to 2"):
            use([held[0], BlockId(block)])
    with pytest.raises(MemoryPlanError, match="not of this pool"):
        pool.ref_count(BlockId(block))
    assert [pool.ref_count(block) for block in held] == [1, 1, 1]


def test_leaks_are_listed() -> None:
    pool = BlockPool(40)
    blocks = pool.allocate(3)
    pool.release([blocks[1]])
    with pytest.raises(MemoryPlanError, match=r"2 blocks \(0, 2\) leaked"):
        pool.close()
    pool.allocate(38)
    with pytest.raises(MemoryPlanError, match="15 and 24 more"):
        pool.close()


def test_close_refuses_leaks_then_closes_for_good() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    with pytest.raises(MemoryPlanError, match="leaked"):
        pool.close()
    pool.release(held)  # still open
    pool.close()
    pool.close()
    for n in (0, 1, 2):
        with pytest.raises(MemoryPlanError, match="closed"):
            pool.allocate(n)


def test_as_a_context_it_checks_for_leaks_but_never_hides_an_error() -> None:
    with pytest.raises(MemoryPlanError, match="leaked"), BlockPool(2) as pool:
        pool.allocate(1)
    with pytest.raises(OutOfBlocksError), BlockPool(2) as pool:
        _ = pool.allocate(1), pool.allocate(2)


def test_nonsense_numbers_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="num_blocks is 0"):
        BlockPool(0)
    with pytest.raises(InvalidInputError, match="-1 blocks wanted"):
        BlockPool(1).allocate(-1)


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
