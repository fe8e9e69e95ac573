"""A budget of tokens per iteration: decodes first, then as much of the prompts as is left."""

from __future__ import annotations

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import WorkerId
from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.chunked import ChunkedScheduler

WORKER = WorkerId(0)


def make(
    max_batch_tokens: int, *, num_blocks: int = 64, block_size: int = 4, max_batch_size: int = 8, **options: int
) -> ChunkedScheduler:
    tables = BlockTables(num_blocks=num_blocks, block_size=block_size)
    return ChunkedScheduler(
        tables,
        max_batch_size=max_batch_size,
        max_model_len=200,
        max_batch_tokens=max_batch_tokens,
        watermark=0.0,
        **options,
    )


def add(scheduler: ChunkedScheduler, name: str, prompt: int, new: int = 3, first: int = 0) -> None:
    ids = tuple(range(first, first + prompt))
    scheduler.add(GenerationRequest(request_id=name, prompt_token_ids=ids, max_new_tokens=new), now=0)


def shape(batch: IterationBatch | None) -> list[tuple[str, int, bool]]:
    """Return each request's number of tokens in the batch, and whether it samples one."""
    if batch is None:
        return []
    return [(part.request_id, part.num_tokens, part.sampling is not None) for part in batch.requests]


def complete(scheduler: ChunkedScheduler, batch: IterationBatch) -> None:
    scheduler.complete(batch, IterationOutput(tuple(SampledToken(p.request_id, 7) for p in batch.sampled)), 0)


def iterate(scheduler: ChunkedScheduler) -> list[tuple[str, int, bool]]:
    batch = scheduler.next_batch(WORKER, 0)
    if batch is not None:
        complete(scheduler, batch)
    return shape(batch)


def test_prompts_take_small_chunks_where_others_decode_and_all_where_nobody_does():
    scheduler = make(16, max_chunk_tokens=4)
    add(scheduler, "a", 20, new=4)
    assert iterate(scheduler) == [("a", 16, False)], "nobody waits"
    assert iterate(scheduler) == [("a", 4, True)]
    add(scheduler, "b", 8, new=2, first=100)
    add(scheduler, "c", 2, new=2, first=200)
    assert iterate(scheduler) == [("a", 1, True), ("b", 4, False)]
    assert iterate(scheduler) == [("a", 1, True), ("b", 3, False)]
    assert iterate(scheduler) == [("a", 1, True), ("b", 1, True), ("c", 2, True)], "both in one chunk"
    assert iterate(scheduler) == [("b", 1, True), ("c", 1, True)]
    with pytest.raises(InvalidInputError, match="max_chunk_tokens is 0"):
        make(16, max_chunk_tokens=0)


def test_chunks_shrink_as_a_prompt_goes_on_and_never_end():
    tables = BlockTables(num_blocks=400, block_size=64)
    options = {"max_batch_size": 8, "max_model_len": 20_000, "max_batch_tokens": 512}
    scheduler = ChunkedScheduler(tables, **options, max_chunk_tokens=24)
    add(scheduler, "a", 3, new=2000)
    iterate(scheduler)
    add(scheduler, "b", 12_000)
    sizes = []
    while sum(sizes) < 12_000:
        ((_, one, _), (name, size, _)) = iterate(scheduler)
        assert (one, name) == (1, "b")
        sizes.append(size)
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert (sizes[0], sizes[1]) == (24, 23)
    at = {sum(sizes[:index]): size for index, size in enumerate(sizes)}
    assert {size for past, size in at.items() if 4096 <= past < 4200} <= {11, 12}
    scheduler = ChunkedScheduler(BlockTables(num_blocks=400, block_size=64), **options, max_chunk_tokens=1)
    add(scheduler, "a", 3, new=2000)
    iterate(scheduler)
    add(scheduler, "b", 40)
    add(scheduler, "c", 40)
    assert [iterate(scheduler) for _ in range(3)] == [[("a", 1, True), ("b", 1, False)]] * 3


def test_chunks_continue_where_the_last_one_ended():
    scheduler = make(5)
    add(scheduler, "a", 12)
    positions = []
    for _ in range(3):
        batch = scheduler.next_batch(WORKER, 0)
        positions += batch.positions
        complete(scheduler, batch)
    assert positions == list(range(12))


def test_the_batch_size_holds_for_decodes_and_chunks_together():
    scheduler = make(64, max_batch_size=2)
    for number, name in enumerate("abc"):
        add(scheduler, name, 2, first=10 * number)
    assert iterate(scheduler) == [("a", 2, True), ("b", 2, True)]
    assert iterate(scheduler) == [("a", 1, True), ("b", 1, True)]


def test_shared_blocks_cost_no_budget():
    scheduler = make(8)
    add(scheduler, "a", 8, new=1)
    assert iterate(scheduler) == [("a", 8, True)]
    add(scheduler, "b", 12)
    add(scheduler, "c", 4, first=100)
    assert iterate(scheduler) == [("b", 4, True), ("c", 4, True)]


def overtaken(max_batch_size: int) -> ChunkedScheduler:
    """The order is f, e, d: f took e's blocks while d was in flight, and has left; e is behind d now."""
    scheduler = make(2, num_blocks=9, block_size=1, max_batch_size=max_batch_size)
    for number, (name, new) in enumerate([("f", 3), ("e", 7), ("d", 7)]):
        add(scheduler, name, 2, new=new, first=10 * number)
    flight = []

    def start() -> list[str]:
        batch = scheduler.next_batch(WORKER, 0)
        if batch is None:
            return []
        flight.append(batch)
        return [part.request_id for part in batch.requests]

    assert [start() for _ in range(3)] == [["f"], ["e"], ["d"]]
    for name in "fed":
        complete(scheduler, flight.pop(0))
        assert start() == [name]
    complete(scheduler, flight.pop(0))
    assert start() == []
    complete(scheduler, flight.pop(0))
    assert start() == ["f"]
    assert scheduler.pool.num_preemptions == 1
    for batch in flight:
        complete(scheduler, batch)
    assert scheduler.num_unfinished == 2
    return scheduler


def test_after_a_preemption_the_earlier_decode_goes_first_again():
    scheduler = overtaken(max_batch_size=1)
    d, e1 = scheduler.next_batch(WORKER, 0), scheduler.next_batch(WORKER, 0)
    assert (shape(d), shape(e1)) == ([("d", 1, True)], [("e", 2, False)])
    complete(scheduler, d)
    complete(scheduler, e1)
    assert iterate(scheduler) == [("e", 1, True)]


def test_a_decode_waits_rather_than_take_the_blocks_of_an_earlier_prompt():
    scheduler = overtaken(max_batch_size=2)
    scheduler.pool.block_tables.clear_cache()  # e computes all of its four tokens again
    assert iterate(scheduler) == [("d", 1, True), ("e", 1, False)]
    assert iterate(scheduler) == [("d", 1, True), ("e", 1, False)]
    assert iterate(scheduler) == [("e", 2, True)], "nine blocks: e has four of them, d five"
    assert scheduler.pool.num_preemptions == 1


def test_an_impossible_budget_is_refused():
    with pytest.raises(InvalidInputError, match="max_batch_tokens is 0"):
        make(0)
