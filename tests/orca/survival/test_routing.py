"""Which replica serves a request, and whether a front's picture of what replicas keep is exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import WorkerId
from mlsys_orca.engine.fleet.replica import NOTHING, history, summed
from mlsys_orca.engine.fleet.routing import KeptBlocks, Load, chain_of, choose
from mlsys_orca.engine.settings import EngineCounts, PoolCounts
from mlsys_orca.scheduling.batch import GenerationRequest

from tests.orca.survival.test_progress import BLOCK, REQUESTS, Memory, requests_of, run, scheduler_of

LOADS = st.lists(
    st.builds(
        Load,
        is_serving=st.booleans(),
        num_requests=st.integers(0, 5),
        num_outstanding_tokens=st.integers(0, 9),
        num_shared_blocks=st.integers(0, 3),
        num_kept_blocks=st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)


@given(LOADS, st.integers(1, 5))
def test_a_request_goes_to_who_has_its_prompt_and_room_else_to_who_has_least_to_do(loads: list[Load], size: int):
    chosen = loads[choose(loads, max_batch_size=size)]
    assert chosen.is_serving or not any(load.is_serving for load in loads)
    able = [load for load in loads if load.is_serving == chosen.is_serving]
    warm = [load for load in able if load.num_shared_blocks and load.num_requests < size]
    if warm:
        assert chosen in warm
        assert chosen.num_shared_blocks == max(load.num_shared_blocks for load in warm)
    else:
        assert chosen.num_outstanding_tokens == min(load.num_outstanding_tokens for load in able)


@given(LOADS, st.integers(1, 5))
def test_what_a_replica_that_does_not_serve_keeps_changes_nothing(loads: list[Load], size: int):
    loads = [*loads, Load(is_serving=True, num_requests=0, num_outstanding_tokens=0)]
    blind = [load if load.is_serving else replace(load, num_shared_blocks=0, num_requests=99) for load in loads]
    assert choose(loads, max_batch_size=size) == choose(blind, max_batch_size=size)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=60), st.integers(1, 4))
def test_work_spreads_and_no_replica_is_left_out(asked: list[tuple[int, int]], num: int):
    """Requests that share prompts by number, none of which ever ends: no replica is over its batch before all are."""
    held: list[set[int]] = [set() for _ in range(num)]
    counts, tokens = [0] * num, [0] * num
    for prompt, new in asked:
        loads = [
            Load(
                is_serving=True,
                num_requests=counts[index],
                num_outstanding_tokens=tokens[index],
                num_shared_blocks=int(prompt in held[index]),
            )
            for index in range(num)
        ]
        index = choose(loads, max_batch_size=2)
        counts[index] += 1
        tokens[index] += new
        held[index].add(prompt)
    assert max(tokens) - min(tokens) <= 30 * 2 + 30  # a sticky batch of the longest, and one more


def test_there_must_be_a_replica():
    with pytest.raises(InvalidInputError):
        choose([], max_batch_size=1)


@pytest.mark.parametrize("policy", ["orca", "paged", "chunked", "request-level"])
@given(asked=REQUESTS, later=REQUESTS)
def test_the_front_knows_what_a_prompt_will_find(policy: str, asked: Any, later: Any):
    scheduler, tables = scheduler_of(policy)
    tables.note_cache_changes()
    kept, memory = KeptBlocks(), Memory()
    waves = [requests_of(asked), [replace(each, request_id=f"later {each.request_id}") for each in requests_of(later)]]
    for request in (request for wave in waves for request in wave):
        predicted = kept.num_leading(chain_of(request, BLOCK)) * BLOCK
        scheduler.add(request, 0.0)
        batch = scheduler.next_batch(WorkerId(0), 0.0)
        state = scheduler.pool.sequences[request.request_id]
        if state.block_table:  # it was admitted at once
            assert state.num_cached_tokens == min(predicted, len(request.prompt_token_ids) - 1)
        while batch is not None:
            kept.update(tables.take_cache_changes())
            scheduler.complete(batch, run(batch, memory), 0.0)
            batch = scheduler.next_batch(WorkerId(0), 0.0)
        kept.update(tables.take_cache_changes())


def test_a_prompt_whose_scores_are_wanted_has_no_chain():
    plain = GenerationRequest(request_id="a", prompt_token_ids=tuple(range(9)), max_new_tokens=1)
    chains = [chain_of(replace(plain, **change), 4) for change in ({}, {"adapter": "x"}, {"num_encoder_tokens": 3})]
    assert [len(chain) for chain in chains] == [2, 2, 0]
    assert chains[0] != chains[1]
    assert not chain_of(replace(plain, sampling=replace(plain.sampling, num_prompt_logprobs=0)), 4)


def test_totals_outlive_workers():
    pool = PoolCounts(
        num_running=2, num_unfinished=3, num_preemptions=4, num_cached_tokens=5, num_guessed=6, num_right=7
    )
    ended = history(EngineCounts(num_blocks=9, num_free_blocks=1, pool=pool))
    assert (ended.num_blocks, ended.pool) == (0, replace(pool, num_running=0, num_unfinished=0))
    now = EngineCounts(num_blocks=9, num_free_blocks=9, pool=None)
    assert summed([now, NOTHING, ended]) == EngineCounts(num_blocks=9, num_free_blocks=9, pool=ended.pool)
