"""Blocks on demand and shared by content: counts, copy on write, eviction; and the copies on the runner's side."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from mlsys_core.errors import MemoryPlanError
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.scheduling.batch import BatchBuilder
from mlsys_orca.scheduling.block_tables import Allocation, BlockTables
from mlsys_orca.scheduling.pager import extend_digests

BLOCK = 4
A, B = list(range(100, 120)), list(range(200, 220))


def digests_of(tokens: Sequence[int]) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, tokens, BLOCK)
    return digests


def allocate(tables: BlockTables, name: str, tokens: Sequence[int], *, keep_free: int = 0) -> Allocation | None:
    return tables.allocate(name, len(tokens), digests_of(tokens), keep_free=keep_free)


def run(tables: BlockTables, name: str, tokens: Sequence[int]) -> Allocation:
    """Place and publish: ``tokens`` are computed."""
    allocation = allocate(tables, name, tokens)
    tables.publish(name, digests_of(tokens), num_computed_tokens=len(tokens))
    return allocation


def test_digests_name_all_tokens_up_to_their_block() -> None:
    digests = digests_of(A[:11])
    assert len(digests) == 2
    extend_digests(digests, A, BLOCK)
    assert digests == digests_of(A), "extending later gives the same"
    assert len({*digests, *digests_of(B), *digests_of([*B[:4], *A[4:]])}) == 14, "same tokens after others are others"
    assert digests_of([-1, 2**40, 0, 0]) != digests_of([0, 0, 2**40, -1])


def test_a_common_beginning_is_shared_while_it_runs_and_after() -> None:
    tables = BlockTables(num_blocks=8, block_size=BLOCK)
    first = run(tables, "a", A[:10])
    assert first == Allocation((0, 1, 2), 0, None)
    second = allocate(tables, "b", [*A[:8], 1, 2, 3])
    assert second == Allocation((0, 1, 3), 8, None)
    assert [tables.num_holders(block) for block in range(4)] == [2, 2, 1, 1]
    assert [tables.is_read_only(block) for block in range(4)] == [True, True, False, False]
    tables.free("a")
    tables.free("b")
    assert (tables.num_free_blocks, tables.num_cached_blocks) == (8, 2)
    assert allocate(tables, "c", A[:9]).num_cached_tokens == 8
    tables.free("c")
    tables.clear_cache()
    assert (tables.num_free_blocks, tables.num_cached_blocks) == (8, 0)


def test_blocks_not_yet_computed_are_not_shared() -> None:
    tables = BlockTables(num_blocks=8, block_size=BLOCK)
    allocate(tables, "a", A[:8])
    assert allocate(tables, "b", A[:8]).num_cached_tokens == 0
    tables.publish("a", digests_of(A[:8]), num_computed_tokens=7)
    assert allocate(tables, "c", A[:8]).num_cached_tokens == 4
    tables.publish("b", digests_of(A[:8]), num_computed_tokens=8)  # its first block is known from a; its second is new
    assert allocate(tables, "d", A[:8]) == Allocation((0, 5), 7, (3, 5))


def test_the_last_token_is_computed_into_a_copy() -> None:
    tables = BlockTables(num_blocks=8, block_size=BLOCK)
    run(tables, "a", A[:8])
    allocation = allocate(tables, "b", A[:8])
    assert allocation == Allocation((0, 2), 7, (1, 2))
    assert tables.num_holders(1) == 1, "only a: the copy's source is not kept for b"
    tables.publish("b", digests_of(A[:8]), num_computed_tokens=8)
    assert not tables.is_read_only(2), "its content is known already"


def test_too_few_blocks_change_nothing() -> None:
    tables = BlockTables(num_blocks=3, block_size=BLOCK)
    run(tables, "a", A[:8])
    tables.free("a")
    assert allocate(tables, "b", A[:8], keep_free=1) is None, "two shared, one copy of the last, none left"
    assert allocate(tables, "b", A[:9], keep_free=1) is None
    assert (tables.num_free_blocks, tables.num_cached_blocks) == (3, 2)
    assert allocate(tables, "b", A[:9]).num_cached_tokens == 8
    assert tables.grow("b", 12) == (0, 1, 2)
    assert tables.grow("b", 13) is None
    with pytest.raises(MemoryPlanError, match="'b' has its"):
        allocate(tables, "b", A[:4])
    with pytest.raises(MemoryPlanError, match="'c' has no"):
        tables.grow("c", 4)


def test_the_least_recently_used_content_goes_first_and_ends_before_beginnings() -> None:
    tables = BlockTables(num_blocks=6, block_size=BLOCK)
    for name, tokens in (("a", A), ("b", B)):
        run(tables, name, tokens[:9])
        tables.free(name)
    assert tables.num_cached_blocks == 4
    run(tables, "a", A[:9])  # now b's content is the least recently used
    tables.free("a")
    allocate(tables, "x", range(9))  # takes the two blocks without content, and one of b's
    tables.free("x")
    assert allocate(tables, "b", B[:9]).num_cached_tokens == 4
    tables.free("b")
    assert allocate(tables, "a", A[:9]).num_cached_tokens == 8


def test_a_growing_table_takes_blocks_when_the_last_is_full() -> None:
    tables = BlockTables(num_blocks=4, block_size=BLOCK)
    allocate(tables, "a", A[:3])
    assert [tables.grow("a", n) for n in (4, 5, 8, 9)] == [(0,), (0, 1), (0, 1), (0, 1, 2)]


def test_copies_take_all_layers_and_read_before_they_write() -> None:
    config = ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=2,
        intermediate_size=2,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_positions=8,
        norm_eps=1e-5,
    )
    cache = KVCache(config, num_blocks=4, block_size=2, dtype=torch.float32)
    for layer in range(2):
        values = torch.arange(8.0).view(8, 1, 1).expand(8, 1, 2) + 100 * layer
        cache.write(layer, torch.arange(8), values, -values)
    builder = BatchBuilder()
    builder.copy_block(1, 2)
    builder.copy_block(3, 1)
    cache.copy_blocks(builder.build().block_copies)
    nothing = torch.empty(0, 1, 2)
    for layer in range(2):
        keys, values = cache.write(layer, torch.empty(0, dtype=torch.int64), nothing, nothing)
        assert keys[:, 0, 0].tolist() == [100 * layer + slot for slot in (0, 1, 6, 7, 2, 3, 6, 7)]
        assert torch.equal(values, -keys)
