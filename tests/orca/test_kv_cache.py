import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_orca.model.kv_cache import BlockTables, slots_of


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 60)), max_size=60))
def test_blocks_are_conserved_and_never_shared(steps: list[tuple[bool, int, int]]) -> None:
    tables = BlockTables(num_blocks=12, block_size=8)
    held: dict[str, tuple[int, ...]] = {}
    for reserves, number, num_tokens in steps:
        name = str(number)
        if reserves and name not in held and tables.can_reserve(num_tokens):
            held[name] = tables.reserve(name, num_tokens)
            assert len(held[name]) == tables.num_blocks_for(num_tokens)
        elif reserves:
            with pytest.raises(MemoryPlanError):
                tables.reserve(name, num_tokens if name in held else 8 * 13)
        elif name in held:
            tables.free(name)
            del held[name]
        else:
            with pytest.raises(MemoryPlanError, match=repr(name)):
                tables.free(name)
        owned = [block for table in held.values() for block in table]
        assert len(owned) == len(set(owned))
        assert all(0 <= block < 12 for block in owned)
        assert tables.num_free_blocks == 12 - len(owned)


def test_an_uncrowded_cache_gives_runs_of_blocks() -> None:
    tables = BlockTables(num_blocks=8, block_size=4)
    tables.reserve("a", 8)
    tables.reserve("b", 8)
    tables.free("a")
    assert tables.reserve("c", 12) == (0, 1, 4)
    tables.free("b")
    tables.free("c")
    assert tables.reserve("d", 32) == tuple(range(8))


def test_nothing_is_taken_when_too_few_are_free() -> None:
    tables = BlockTables(num_blocks=2, block_size=4)
    with pytest.raises(MemoryPlanError, match="3 blocks wanted, 2 of 2 are free"):
        tables.reserve("a", 9)
    with pytest.raises(InvalidInputError, match="reserves 0 tokens"):
        tables.reserve("a", 0)
    assert tables.num_free_blocks == 2
    assert tables.reserve("a", 8) == (0, 1)
    for num_blocks, block_size in ((0, 4), (4, 0)):
        with pytest.raises(InvalidInputError):
            BlockTables(num_blocks=num_blocks, block_size=block_size)


@settings(max_examples=60)
@given(st.permutations(range(8)), st.integers(0, 30), st.integers(1, 32), st.integers(1, 4))
def test_slots_follow_the_table(blocks: list[int], start: int, length: int, block_size: int) -> None:
    stop = min(start + length, 8 * block_size)
    start = min(start, stop - 1)
    slots = slots_of(tuple(blocks), start, stop, block_size=block_size)
    assert list(slots) == [blocks[p // block_size] * block_size + p % block_size for p in range(start, stop)]


def test_a_run_is_a_range_and_a_short_table_is_refused() -> None:
    assert slots_of((2, 3), 1, 7, block_size=4) == range(9, 15)
    with pytest.raises(MemoryPlanError, match="do not hold 9 tokens"):
        slots_of((2, 3), 0, 9, block_size=4)


def test_the_schedulers_imports_bring_no_torch() -> None:
    code = "import sys, mlsys_orca.scheduling.batch, mlsys_orca.model.kv_cache, mlsys_orca.model.families; "
    code += "import mlsys_orca.loading; "
    code += "print(sorted(m for m in ('torch', 'tokenizers', 'jinja2') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
