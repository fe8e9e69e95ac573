"""A scheduler goes on where another stopped, with its K/V blocks or without them: the tokens are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import MemoryPlanError
from mlsys_core.loop import WorkerId
from mlsys_core.plugins import installed_plugins
from mlsys_orca.engine.fleet.routing import KeptBlocks
from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput, Progress, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler

BLOCK, NUM_BLOCKS = 4, 24
Memory = dict[tuple[int, int], int]  # contents of the K/V cache by block and place in it: a token id


def scheduler_of(policy: str, num_blocks: int = NUM_BLOCKS) -> tuple[Any, BlockTables]:
    tables = BlockTables(num_blocks=num_blocks, block_size=BLOCK)
    options = {"max_batch_tokens": 5} if policy == "chunked" else {}
    registry = installed_plugins().registry
    made = make_scheduler(policy, registry, block_tables=tables, max_batch_size=3, max_model_len=40, options=options)
    return made, tables


def run(batch: IterationBatch, memory: Memory) -> IterationOutput:
    """A model whose next token is a hash of all tokens that it reads back from the K/V memory."""
    for source, destination in batch.block_copies:
        for place in range(BLOCK):
            if (source, place) in memory:
                memory[destination, place] = memory[source, place]
    sampled = []
    for part in batch.requests:
        for row in range(part.start, part.stop):
            position = batch.positions[row]
            memory[part.block_table[position // BLOCK], position % BLOCK] = batch.token_ids[row]
        if part.sampling is not None:
            read = tuple(
                memory[part.block_table[position // BLOCK], position % BLOCK] for position in range(part.context_len)
            )
            sampled.append(SampledToken(part.request_id, hash(read) % 97))
    return IterationOutput(tuple(sampled))


def serve(scheduler: Any, memory: Memory, answers: dict[str, list[int]], num_iterations: int | None = None) -> int:
    """Run to the end, or for so many iterations; return how many tokens were computed."""
    num_computed = 0
    while scheduler.num_unfinished and num_iterations != 0:
        batch = scheduler.next_batch(WorkerId(0), 0.0)
        assert batch is not None
        output = run(batch, memory)
        num_computed += batch.num_tokens
        for finished in scheduler.complete(batch, output, 0.0):
            answers[finished.request_id] = [token.token_id for token in finished.result.tokens]
        num_iterations = None if num_iterations is None else num_iterations - 1
    return num_computed


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
# Of each: the prompt, the tokens asked for, and how many of the prompt's an encoder reads, at most.
REQUESTS = st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=6)


def requests_of(asked: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            max_new_tokens=new,
            num_encoder_tokens=min(num_read, len(prompt) - 1),
        )
        for number, (prompt, new, num_read) in enumerate(asked)
    ]


def go_on(
    policy: str,
    first: Any,
    first_tables: BlockTables,
    requests: list[GenerationRequest],
    answers: dict[str, list[int]],
    *,
    keeps: bool = True,
) -> tuple[Any, BlockTables]:
    """Have another scheduler go on with what is left, as a front does; ``answers`` has what there is of them then."""
    left = dict(first.pool.sequences)
    answers |= {name: [token.token_id for token in state.tokens] for name, state in left.items()}
    second, tables = scheduler_of(policy, first_tables.num_blocks)
    if keeps:
        kept = KeptBlocks()
        kept.update(first_tables.take_cache_changes())
        for name, state in left.items():  # under request-level they wait for the others; a front lets them leave
            if state.finish_reason:
                first_tables.free(name)
        held = {
            name: state.block_table for name, state in left.items() if state.block_table and not state.finish_reason
        }
        tables.restore(held, kept.digests)
        assert tables.num_free_blocks == first_tables.num_free_blocks
        assert tables.num_cached_blocks == first_tables.num_cached_blocks
    for request in requests:
        state = left.get(request.request_id)
        if state is None or state.finish_reason:
            continue
        progress = Progress(tuple(answers[request.request_id]))
        if keeps:
            progress = Progress(progress.answer, state.block_table, state.num_computed_tokens)
        second.add(replace(request, progress=progress), 0.0)
    return second, tables


@pytest.mark.parametrize("keeps", [True, False], ids=["blocks kept", "blocks lost"])
@pytest.mark.parametrize("policy", ["orca", "paged", "chunked", "request-level"])
@given(asked=REQUESTS, num_before=st.integers(0, 30))
def test_answers_are_those_of_an_undisturbed_run(policy: str, keeps: bool, asked: Any, num_before: int):
    requests = requests_of(asked)
    whole: dict[str, list[int]] = {request.request_id: [] for request in requests}
    scheduler, _ = scheduler_of(policy)
    for request in requests:
        scheduler.add(request, 0.0)
    num_whole = serve(scheduler, {}, whole)

    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    first, first_tables = scheduler_of(policy)
    memory: Memory = {}
    for request in requests:
        first.add(request, 0.0)
    first_tables.note_cache_changes()
    num_computed = serve(first, memory, answers, num_before)
    second, tables = go_on(policy, first, first_tables, requests, answers, keeps=keeps)
    num_computed += serve(second, memory if keeps else {}, answers)
    assert answers == whole
    if keeps and policy == "orca":  # no prefixes are shared, so that each token is computed once in either run
        assert num_computed == num_whole
    assert tables.num_free_blocks == NUM_BLOCKS


def serve_alone(scheduler: Any, name: str, memory: Memory, answers: dict[str, list[int]], num_iterations: int) -> None:
    """Run only the request called ``name``, as long as it lives and at most for so many iterations."""
    scheduler.pool.alone = name
    for _ in range(num_iterations):
        batch = scheduler.next_batch(WorkerId(0), 0.0)
        if batch is None:
            assert name not in scheduler.pool.sequences
            return
        assert [part.request_id for part in batch.requests] == [name]
        for finished in scheduler.complete(batch, run(batch, memory), 0.0):
            answers[finished.request_id] = [token.token_id for token in finished.result.tokens]


@pytest.mark.parametrize("num_blocks", [10, NUM_BLOCKS], ids=["one longest fits", "three fit"])
@pytest.mark.parametrize("policy", ["orca", "paged", "chunked", "request-level"])
@given(data=st.data(), asked=REQUESTS, num_before=st.integers(0, 30))
def test_each_may_run_alone_while_the_others_keep_their_blocks(
    policy: str, num_blocks: int, data: Any, asked: Any, num_before: int
):
    requests = requests_of(asked)
    whole: dict[str, list[int]] = {}
    scheduler, _ = scheduler_of(policy)
    for request in requests:
        scheduler.add(request, 0.0)
    serve(scheduler, {}, whole)

    answers: dict[str, list[int]] = {}
    memory: Memory = {}
    first, first_tables = scheduler_of(policy, num_blocks)
    for request in requests:
        first.add(request, 0.0)
    first_tables.note_cache_changes()
    serve(first, memory, answers, num_before)
    scheduler, tables = go_on(policy, first, first_tables, requests, answers)
    preempted: list[str] = []
    scheduler.pool.on_preempted = preempted.append
    for name in data.draw(st.permutations([request.request_id for request in requests])):
        reserved = policy in ("orca", "request-level") and name in scheduler.pool.holders
        num_before_it = len(preempted)
        serve_alone(scheduler, name, memory, answers, data.draw(st.integers(1, 3)))
        assert not reserved or len(preempted) == num_before_it
    scheduler.pool.alone = None
    serve(scheduler, memory, answers)
    assert answers == whole
    assert tables.num_free_blocks == num_blocks


def test_a_block_in_use_is_not_given_away():
    tables = BlockTables(num_blocks=4, block_size=2)
    tables.reserve("a", 2)
    with pytest.raises(MemoryPlanError):
        tables.restore({"b": (0,)})
