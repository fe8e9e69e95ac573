import pytest
from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_core.memory import BlockId, BlockPool, OutOfBlocksError


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocksError, match="2 blocks wanted, 1 of 4 are free") as caught:
        pool.allocate(2)
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    assert isinstance(caught.value, MemoryPlanError)
    assert pool.try_allocate(2) is None
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
    with pytest.raises(MemoryPlanError, match=r"2 blocks \(0, 2\) leaked"):
        pool.check_leaks(expected_live=[blocks[1]])
    pool.check_leaks(expected_live=blocks)
    pool.release(blocks)
    with pytest.raises(MemoryPlanError, match=r"1 block \(1\) should be held but not"):
        pool.check_leaks(expected_live=[blocks[1]])
    pool.allocate(40)
    with pytest.raises(MemoryPlanError, match="15 and 24 more"):
        pool.check_leaks()


def test_close_refuses_leaks_then_closes_for_good() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    with pytest.raises(MemoryPlanError, match="leaked"):
        pool.close()
    pool.release(held)  # still open
    pool.close()
    pool.close()
    for use in (pool.allocate, pool.try_allocate):
        for n in (0, 1, 2):
            with pytest.raises(MemoryPlanError, match="closed"):
                use(n)


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
