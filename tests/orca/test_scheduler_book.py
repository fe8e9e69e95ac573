"""The request pool: limits at their edge, what a batch says of each request, guesses, and prompts that are scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import FinishReason, WorkerId
from mlsys_orca.scheduling.batch import (
    GenerationRequest,
    IterationBatch,
    IterationOutput,
    SampledToken,
    SamplingParams,
    ScoredPrompt,
    SliceDetails,
)
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.chunked import ChunkedScheduler
from mlsys_orca.scheduling.orca import IterationScheduler
from mlsys_orca.scheduling.paged import PagedScheduler
from mlsys_orca.scheduling.request_level import RequestLevelScheduler
from mlsys_orca.scheduling.request_pool import MAX_SCORED_ROWS

WORKER = WorkerId(0)
POLICIES = [IterationScheduler, PagedScheduler, ChunkedScheduler, RequestLevelScheduler]
each_policy = pytest.mark.parametrize("policy", POLICIES)


def make(policy: Any = IterationScheduler, *, num_blocks: int = 64, block_size: int = 4, **options: Any) -> Any:
    tables = BlockTables(num_blocks=num_blocks, block_size=block_size)
    return policy(tables, **{"max_batch_size": 4, "max_model_len": 600, **options})


def request(name: str, prompt: Sequence[int] = (1, 2, 3), **options: Any) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), **{"max_new_tokens": 8, **options})


def start(scheduler: Any) -> IterationBatch:
    batch = scheduler.next_batch(WORKER, 0.0)
    assert batch is not None
    return batch


def output(batch: IterationBatch, answers: Mapping[str, Sequence[int]] | None = None) -> IterationOutput:
    """The tokens given, by request; 9 for each request of which nothing is said."""
    sampled = [
        SampledToken(part.request_id, token)
        for part in batch.sampled
        for token in (answers or {}).get(part.request_id, (9,))
    ]
    return IterationOutput(tuple(sampled))


def iterate(scheduler: Any, **answers: Sequence[int]) -> IterationBatch:
    batch = start(scheduler)
    scheduler.complete(batch, output(batch, answers), 0.0)
    return batch


@each_policy
def test_the_least_limits_that_serve_anything(policy: Any) -> None:
    scheduler = make(policy, max_batch_size=1, max_model_len=2, num_blocks=1)
    scheduler.add(request("a", (1,), max_new_tokens=1), 0.0)
    batch = start(scheduler)
    (left,) = scheduler.complete(batch, output(batch), 0.0)
    assert [token.token_id for token in left.result.tokens] == [9]
    for wrong in ({"max_batch_size": 0}, {"max_model_len": 1}):
        with pytest.raises(InvalidInputError, match=r"max_batch_size . must be at least 1, max_model_len \d+ at least"):
            make(policy, **wrong)


@each_policy
@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(64, 10), (5, 600)])
def test_a_request_may_take_all_that_the_model_and_the_cache_hold(
    policy: Any, num_blocks: int, max_model_len: int
) -> None:
    scheduler = make(policy, num_blocks=num_blocks, block_size=2, max_model_len=max_model_len)
    with pytest.raises(InvalidInputError, match="has 3 tokens and asks for 8 more, 11 in all; this server takes at mo"):
        scheduler.add(request("a"), 0.0)
    assert scheduler.num_unfinished == 0
    scheduler.add(request("a", max_new_tokens=7), 0.0)
    assert scheduler.num_unfinished == 1
    for _ in range(7):
        iterate(scheduler)
    assert scheduler.num_unfinished == 0


@each_policy
def test_running_are_those_with_blocks(policy: Any) -> None:
    scheduler = make(policy, max_batch_size=2)
    for name in "abc":
        scheduler.add(request(name, max_new_tokens=1), 0.0)
    assert (scheduler.pool.num_running, scheduler.num_unfinished) == (0, 3)
    batch = start(scheduler)
    assert (scheduler.pool.num_running, scheduler.num_unfinished) == (2, 3)
    scheduler.complete(batch, output(batch), 0.0)
    assert (scheduler.pool.num_running, scheduler.num_unfinished) == (0, 1)
    assert scheduler.wake_at(0.0) is None


@each_policy
def test_nothing_to_run_is_no_batch(policy: Any) -> None:
    scheduler = make(policy)
    assert scheduler.next_batch(WORKER, 0.0) is None
    scheduler.add(request("a"), 0.0)
    batch = start(scheduler)
    assert scheduler.next_batch(WORKER, 0.0) is None
    assert list(scheduler.cancel("nobody", 0.0)) == []
    scheduler.complete(batch, output(batch), 0.0)
    assert [part.request_id for part in start(scheduler).requests] == ["a"]


def test_a_plain_request_has_no_details_and_others_what_the_runner_needs() -> None:
    scheduler = make()
    penalised = SamplingParams(presence_penalty=0.5)
    scheduler.add(request("plain"), 0.0)
    scheduler.add(request("adapted", adapter="x"), 0.0)
    scheduler.add(request("penalised", sampling=penalised), 0.0)
    scheduler.add(request("scored", sampling=SamplingParams(num_prompt_logprobs=2)), 0.0)
    first, second = iterate(scheduler), iterate(scheduler)
    assert [part.details for part in first.requests] == [
        None,
        SliceDetails(num_prompt_tokens=3, adapter="x"),
        SliceDetails(past=(1, 2, 3), num_prompt_tokens=3),
        SliceDetails(past=(1, 2, 3), num_prompt_tokens=3, num_prompt_logprobs=2),
    ]
    assert second.requests[2].details == SliceDetails(past=(1, 2, 3, 9), num_prompt_tokens=3)
    assert [part.sampling for part in second.requests][2] is penalised
    assert not first.is_plain


def test_a_scored_prompt_comes_in_runs_of_rows_and_its_scores_with_the_result() -> None:
    scheduler = make(num_blocks=200)
    num_prompt = MAX_SCORED_ROWS + 3
    scoring = SamplingParams(num_prompt_logprobs=0)
    scheduler.add(request("a", range(num_prompt), max_new_tokens=2, sampling=scoring), 0.0)
    scheduler.add(request("b", range(num_prompt)), 0.0)
    lengths, scores = [], []
    for _ in range(3):
        batch = start(scheduler)
        part = batch.requests[0]
        lengths.append((part.num_computed_tokens, part.num_tokens, part.sampling is not None))
        scores.append(ScoredPrompt("a", part.num_computed_tokens + 1, (SampledToken("a", 1, -0.5),)))
        done = scheduler.complete(batch, IterationOutput(output(batch).sampled, (scores[-1],)), 0.0)
    assert lengths == [(0, MAX_SCORED_ROWS, False), (MAX_SCORED_ROWS, 3, True), (num_prompt, 1, True)]
    assert batch.requests[1].context_len == num_prompt + 2, "another's prompt runs whole"
    assert [(left.request_id, left.result.scored) for left in done] == [("a", tuple(scores))]


# Guesses (prompt lookup): the prompt repeats itself, so a draft of what followed is at hand.
REPEATED = (1, 2, 3, 4, 5, 6, 1, 2)


def guessing(num_draft_tokens: int, *, policy: Any = IterationScheduler, new: int = 20, **options: Any) -> Any:
    """A scheduler whose request ``a`` has just got 3, which is followed by 4, 5, 6, 1, 2 in its prompt."""
    scheduler = make(policy, **options)
    scheduler.pool.num_draft_tokens = num_draft_tokens
    scheduler.add(request("a", REPEATED, max_new_tokens=new, stop_token_ids=frozenset({6})), 0.0)
    first = iterate(scheduler, a=(3,))
    assert first.token_ids == REPEATED, "no guesses behind a prompt"
    return scheduler


def test_wrong_guesses_cost_nothing_but_their_rows() -> None:
    scheduler = guessing(2)
    batch = iterate(scheduler, a=(8,))
    assert batch.num_tokens == 3
    assert scheduler.pool.sequences["a"].num_computed_tokens == 9
    assert (scheduler.pool.num_guessed, scheduler.pool.num_right) == (2, 0)
    batch = iterate(scheduler)
    assert (batch.token_ids, batch.positions) == ((8,), (9,))
    assert (scheduler.pool.num_guessed, scheduler.pool.num_right) == (2, 0)


def test_two_requests_with_guesses_each_get_their_own() -> None:
    scheduler = make()
    scheduler.pool.num_draft_tokens = 2
    for name in "ab":
        scheduler.add(request(name, REPEATED), 0.0)
    iterate(scheduler, a=(3,), b=(3,))
    iterate(scheduler, a=(4, 5, 60), b=(61,))
    sequences = scheduler.pool.sequences
    assert [token.token_id for token in sequences["a"].tokens] == [3, 4, 5, 60]
    assert [token.token_id for token in sequences["b"].tokens] == [3, 61]
    assert (sequences["a"].num_computed_tokens, sequences["b"].num_computed_tokens) == (11, 9)
    assert (scheduler.pool.num_guessed, scheduler.pool.num_right) == (4, 2)


@pytest.mark.parametrize(("new", "num_guesses"), [(2, 0), (3, 1), (4, 2), (20, 4)])
def test_there_are_no_more_guesses_than_the_answer_has_room_for(new: int, num_guesses: int) -> None:
    """One of ``new`` tokens is there, and the next is sure."""
    assert start(guessing(4, new=new)).num_tokens == 1 + num_guesses


@pytest.mark.parametrize(("block_size", "num_guesses"), [(3, 0), (5, 1), (11, 2), (4, 3), (16, 5)])
def test_there_are_no_more_guesses_than_the_blocks_hold(block_size: int, num_guesses: int) -> None:
    """Blocks on demand: nine tokens are there."""
    assert start(guessing(5, policy=PagedScheduler, block_size=block_size)).num_tokens == 1 + num_guesses


def test_nothing_is_guessed_unless_asked_for() -> None:
    scheduler = make()
    scheduler.add(request("a", REPEATED), 0.0)
    iterate(scheduler, a=(3,))
    assert start(scheduler).token_ids == (3,)
    assert scheduler.pool.sequences["a"].ngrams is None


# The budget of the chunked policy.


def test_a_budget_of_one_token_serves() -> None:
    scheduler = make(ChunkedScheduler, max_batch_tokens=1)
    scheduler.add(request("a", (5, 6), max_new_tokens=2), 0.0)
    assert [iterate(scheduler).token_ids for _ in range(3)] == [(5,), (6,), (9,)]
    assert scheduler.num_unfinished == 0


def test_the_end_of_a_prompt_is_a_chunk_and_no_decode() -> None:
    scheduler = make(ChunkedScheduler, max_batch_tokens=3)
    for name in "ab":
        scheduler.add(request(name, (ord(name),)), 0.0)
    scheduler.add(request("c", range(5)), 0.0)
    shapes = [[part.num_tokens for part in iterate(scheduler).requests] for _ in range(6)]
    assert shapes == [[1, 1, 1]] * 6, "the budget holds, though c lacks two tokens at some time"


@pytest.mark.parametrize("policy", [PagedScheduler, ChunkedScheduler])
def test_blocks_are_kept_free_and_shared_as_asked(policy: Any) -> None:
    scheduler = make(policy, num_blocks=10, block_size=1, watermark=0.5)
    scheduler.add(request("a", range(3), max_new_tokens=1), 0.0)
    scheduler.add(request("b", range(20, 23), max_new_tokens=1), 0.0)
    assert [part.request_id for part in start(scheduler).requests] == ["a"], "seven free, five of them to be kept"
    for prefix_caching in (False, True):
        scheduler = make(policy, block_size=1, prefix_caching=prefix_caching)
        for name in "ab":
            scheduler.add(request(name, range(3), max_new_tokens=1), 0.0)
            iterate(scheduler)
        assert scheduler.pool.num_cached_tokens == (2 if prefix_caching else 0)


# The baseline.


def test_a_request_cancelled_in_flight_leaves_its_batch_running() -> None:
    scheduler = make(RequestLevelScheduler)
    for name in "ab":
        scheduler.add(request(name, max_new_tokens=2), 0.0)
    batch = start(scheduler)
    assert list(scheduler.cancel("a", 0.0)) == []
    (left,) = scheduler.complete(batch, output(batch), 0.0)
    assert (left.request_id, left.reason) == ("a", FinishReason.CANCELLED)
    batch = start(scheduler)
    assert [part.request_id for part in batch.requests] == ["b"]
    (left,) = scheduler.complete(batch, output(batch), 0.0)
    assert (left.request_id, left.reason) == ("b", FinishReason.DONE)


def test_an_error_of_the_iteration_fails_those_in_it_and_the_batch_goes_on() -> None:
    scheduler = make(RequestLevelScheduler, microbatch_size=1)
    scheduler.add(request("a", max_new_tokens=1), 0.0)
    scheduler.add(request("b", max_new_tokens=1), 0.0)
    first, second = start(scheduler), start(scheduler)
    assert scheduler.complete(first, output(first), 0.0) == [], "a waits for b"
    error = RuntimeError("lost")
    left = scheduler.fail(second, error, 0.0)
    assert [(each.request_id, each.reason, each.error) for each in left] == [
        ("b", FinishReason.FAILED, error),
        ("a", FinishReason.DONE, None),
    ]
