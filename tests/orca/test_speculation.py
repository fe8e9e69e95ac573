"""Guesses change no answer, greedy or sampled, under every policy; and save iterations where texts repeat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.loop import FinishReason, WorkerId
from mlsys_core.plugins import installed_plugins
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import GenerationRequest, GenerationResult, SampledToken, SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_orca.scheduling.request_pool import NgramIndex

POLICIES = {
    "orca": {},
    "paged": {"watermark": 0.0},
    "chunked": {"max_batch_tokens": 9},
    "request-level": {"lockstep": False},
}


@given(st.lists(st.integers(0, 2), min_size=3, max_size=40), st.integers(1, 6))
def test_a_draft_is_what_followed_the_last_three_tokens_when_they_were_last_seen(tokens, count):
    index, grown = NgramIndex(), []
    for token in tokens:
        grown.append(token)
        draft = index.draft(grown, count)
    seen = [end for end in range(3, len(tokens)) if tokens[end - 3 : end] == tokens[-3:]]
    assert draft == (tokens[seen[-1] : seen[-1] + count] if seen else [])


@pytest.fixture
def loaded(make_gguf: Callable[..., Path]) -> LoadedModel:
    return load_model(make_gguf(), dtype="fp32")


def requests() -> list[GenerationRequest]:
    prompts = [(5, 6, 7, 5, 6, 7, 5, 6), (9, 10, 11), (20, 21, 20, 21, 20, 21, 20)]
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.4, top_k=3, seed=7),
        SamplingParams(temperature=0.3, top_p=0.9, seed=8, presence_penalty=0.4, num_logprobs=1),
    ]
    return [
        GenerationRequest(
            request_id=f"{number}",
            prompt_token_ids=prompt,
            max_new_tokens=30,
            sampling=sampling,
            stop_token_ids=frozenset({40 + number}),
        )
        for number, (prompt, sampling) in enumerate(itertools.product(prompts, samplings))
    ]


def run(
    loaded: LoadedModel, policy: str, num_draft_tokens: int, *, num_blocks: int
) -> tuple[dict[str, GenerationResult], int, tuple[int, int, int]]:
    """All results, the requests in all iterations, and (guesses, right ones, blocks that are not free at the end)."""
    tables = BlockTables(num_blocks=num_blocks)
    registry = installed_plugins().registry
    limits = {"block_tables": tables, "max_batch_size": 4, "max_model_len": 64, "options": POLICIES[policy]}
    scheduler = make_scheduler(policy, registry, **limits)
    scheduler.pool.num_draft_tokens = num_draft_tokens
    runner = Runner(loaded.model, new_kv_cache(loaded.model, num_blocks=num_blocks))
    for request in requests():
        scheduler.add(request, 0.0)
    results, num_slices = {}, 0
    while scheduler.num_unfinished:
        batch = scheduler.next_batch(WorkerId(0), 0.0)
        num_slices += len(batch.requests)
        for finished in scheduler.complete(batch, runner.run(batch), 0.0):
            assert finished.reason is FinishReason.DONE
            results[finished.request_id] = finished.result
    pool = scheduler.pool
    tables.clear_cache()
    return results, num_slices, (pool.num_guessed, pool.num_right, num_blocks - tables.num_free_blocks)


def tokens_of(results: dict[str, GenerationResult]) -> dict[str, tuple[Sequence[SampledToken], str]]:
    return {name: (result.tokens, result.finish_reason) for name, result in results.items()}


@pytest.mark.parametrize("policy", list(POLICIES))
def test_guesses_change_no_answer(loaded: LoadedModel, policy: str) -> None:
    plain, num_plain, _ = run(loaded, policy, 0, num_blocks=24)
    guessed, num_guessed, (made, right, leaked) = run(loaded, policy, 4, num_blocks=24)
    assert tokens_of(guessed) == tokens_of(plain)
    assert 0 < right <= made, "otherwise this test shows nothing"
    assert leaked == 0
    assert num_guessed < num_plain


def test_nor_where_blocks_are_scarce_and_requests_are_preempted(loaded: LoadedModel) -> None:
    plain, _, _ = run(loaded, "paged", 0, num_blocks=24)
    crowded, _, (_, right, leaked) = run(loaded, "paged", 4, num_blocks=6)
    assert tokens_of(crowded) == tokens_of(plain)
    assert right > 0
    assert leaked == 0
