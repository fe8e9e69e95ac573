"""Rules of the pager and of cancellation that no other test would miss, each by the fault that breaks it."""

from __future__ import annotations

import pytest
from mlsys_core.loop import FinishReason
from mlsys_orca.scheduling.batch import GenerationRequest, SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.paged import PagedScheduler

from tests.orca.test_scheduler_book import iterate, output, start


def paged(num_blocks: int = 16, *, block_size: int = 2, **options) -> PagedScheduler:
    tables = BlockTables(num_blocks=num_blocks, block_size=block_size)
    return PagedScheduler(tables, **{"max_batch_size": 4, "max_model_len": 24, "watermark": 0.0, **options})


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3, 4, 5), **options) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, **{"max_new_tokens": 8, **options})


def test_the_watermark_is_rounded_up_to_whole_blocks() -> None:
    scheduler = paged(10, watermark=0.05)
    scheduler.add(request("a", tuple(range(8))), 0.0)  # 4 of 10 blocks
    scheduler.add(request("b", tuple(range(20, 32))), 0.0)  # would take the 6 others
    assert [part.request_id for part in start(scheduler).requests] == ["a"]


def test_without_prefix_caching_no_digests_are_made() -> None:
    scheduler = paged(prefix_caching=False)
    scheduler.add(request("a"), 0.0)
    iterate(scheduler)
    assert not scheduler.pool.sequences["a"].digests


@pytest.mark.parametrize(("first", "second", "shared"), [("x", "x", 4), ("x", "y", 0), ("x", None, 0), (None, "x", 0)])
def test_kept_prefixes_are_an_adapters_own(first: str | None, second: str | None, shared: int) -> None:
    scheduler = paged()
    scheduler.add(request("a", adapter=first), 0.0)
    iterate(scheduler)
    scheduler.cancel("a", 0.0)
    scheduler.add(request("b", adapter=second), 0.0)
    iterate(scheduler)
    assert scheduler.pool.num_cached_tokens == shared


def test_so_is_what_a_short_prompt_and_its_answer_fill_together() -> None:
    scheduler = paged()
    scheduler.add(request("a", (1,), adapter="x"), 0.0)
    for _ in range(4):
        iterate(scheduler)
    scheduler.cancel("a", 0.0)
    scheduler.add(request("b", (1, 9, 9, 9, 5)), 0.0)
    iterate(scheduler)
    assert scheduler.pool.num_cached_tokens == 0
    scheduler.add(request("c", (1, 9, 9, 9, 5), adapter="x"), 0.0)
    iterate(scheduler)
    assert scheduler.pool.num_cached_tokens == 4


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole() -> None:
    scheduler = paged()
    scheduler.add(request("a"), 0.0)
    iterate(scheduler)
    scheduler.add(request("b", sampling=SamplingParams(num_prompt_logprobs=0)), 0.0)
    batch = iterate(scheduler)
    lengths = {part.request_id: part.stop - part.start for part in batch.requests}
    assert lengths["b"] == 5
    assert scheduler.pool.num_cached_tokens == 0


def test_cached_tokens_are_counted_over_all_requests() -> None:
    scheduler = paged(32)
    scheduler.add(request("a"), 0.0)
    iterate(scheduler)
    for name in "bc":
        scheduler.add(request(name), 0.0)
        iterate(scheduler)
    assert scheduler.pool.num_cached_tokens == 8


def test_a_request_cancelled_in_the_flight_of_its_last_token_is_cancelled() -> None:
    scheduler = paged()
    scheduler.add(request("a", max_new_tokens=1), 0.0)
    batch = start(scheduler)
    scheduler.cancel("a", 0.0)
    (left,) = scheduler.complete(batch, output(batch), 0.0)
    assert left.reason is FinishReason.CANCELLED
    assert left.result is None


def test_of_an_iteration_that_failed_the_cancelled_are_cancelled_and_the_others_failed() -> None:
    scheduler = paged()
    for name in "ab":
        scheduler.add(request(name), 0.0)
    batch, error = start(scheduler), RuntimeError("the model failed")
    scheduler.cancel("a", 0.0)
    left = {finished.request_id: finished for finished in scheduler.fail(batch, error, 0.0)}
    assert (left["a"].reason, left["a"].error) == (FinishReason.CANCELLED, None)
    assert (left["b"].reason, left["b"].error) == (FinishReason.FAILED, error)
    assert scheduler.num_unfinished == 0


def test_a_request_is_placed_once_however_often_it_is_preempted() -> None:
    scheduler, placed = paged(6, block_size=1), list[str]()
    scheduler.pool.on_placed = placed.append
    scheduler.add(request("a", (1, 2), max_new_tokens=4), 0.0)
    scheduler.add(request("b", (5, 6), max_new_tokens=4), 0.0)
    while scheduler.num_unfinished:
        iterate(scheduler)
    assert scheduler.pool.num_preemptions > 0
    assert placed == ["a", "b"]
