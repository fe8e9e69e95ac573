"""The baseline of the paper: a batch runs to its end; late requests wait, and early finishers too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import FinishReason, SimulatedExecutor, Simulation, WorkerId, simulate
from mlsys_orca.scheduling.batch import GenerationRequest
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.request_level import RequestLevelScheduler

from tests.orca.test_scheduler_figures import names, output

WORKER = WorkerId(0)


def make(max_batch_size: int = 2, *, num_blocks: int = 64, **options: Any) -> RequestLevelScheduler:
    tables = BlockTables(num_blocks=num_blocks, block_size=1)
    return RequestLevelScheduler(tables, max_batch_size=max_batch_size, max_model_len=100, **options)


def request(name: str, prompt: int, new: int, stops: Sequence[int] = ()) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(range(prompt)),
        max_new_tokens=new,
        stop_token_ids=frozenset(stops),
    )


def serve(scheduler: RequestLevelScheduler, trace: Any, num_stages: int = 1) -> Simulation[Any]:
    executor = SimulatedExecutor([lambda _: 1.0] * num_stages, output)
    return simulate(scheduler, executor, [(at, request(*arguments)) for at, *arguments in trace])


def test_figure_3_an_early_finisher_is_computed_on_and_a_late_request_waits():
    simulation = serve(make(), [(0, "1", 2, 4), (0, "2", 2, 2), (1.5, "3", 1, 2)])
    assert [names(run.batch) for run in simulation.runs] == ["12", "12", "12", "12", "3", "3"]
    assert [simulation[name].finished_s for name in "123"] == [4, 4, 6], "2 had its tokens at 2 s"
    assert [token.token_id for token in simulation["2"].finished.result.tokens] == [2, 3]
    assert [token.token_id for token in simulation["1"].finished.result.tokens] == [2, 3, 4, 5]


def test_the_kinder_baseline_leaves_finished_rows_out_but_returns_no_earlier():
    simulation = serve(make(lockstep=False), [(0, "1", 2, 4), (0, "2", 2, 2), (1.5, "3", 1, 2)])
    assert [names(run.batch) for run in simulation.runs] == ["12", "12", "1", "1", "3", "3"]
    assert [simulation[name].finished_s for name in "123"] == [4, 4, 6]


def test_prompts_advance_in_lockstep_from_the_length_of_the_shortest():
    """Section 6.2: the first iteration takes requests as if all had the shortest one's input length."""
    scheduler = make()
    for arguments in (("1", 5, 1), ("2", 2, 2)):
        scheduler.add(request(*arguments), 0)
    rows = []
    while scheduler.num_unfinished:
        batch = scheduler.next_batch(WORKER, 0)
        rows.append([(part.num_tokens, part.sampling is not None) for part in batch.requests])
        scheduler.complete(batch, output(batch), 0)
    # 1 needs its whole prompt before its first token; 2 has both of its tokens by then, and is computed on.
    assert [row[0] for row in rows] == [(2, False), (1, False), (1, False), (1, True)]
    assert [row[1] for row in rows] == [(2, True), (1, True), (1, True), (1, True)]


def test_figure_8b_microbatches_fill_a_pipeline_but_nothing_is_injected():
    trace = [(0, name, 1, 3) for name in "ABCD"]
    simulation = serve(make(microbatch_size=1), trace, num_stages=2)
    assert [names(run.batch) for run in simulation.runs] == list("ABABAB" + "CDCDCD")
    last_b, first_c = simulation.runs[5], simulation.runs[6]
    assert first_c.started_s == last_b.ended_s, "the first worker is idle while the second ends the batch"
    assert simulation["A"].finished_s == simulation["B"].finished_s == last_b.ended_s


def test_a_microbatch_that_has_finished_waits_for_the_others():
    simulation = serve(make(3, microbatch_size=1), [(0, "a", 1, 1), (0, "b", 1, 4), (0, "c", 1, 2)], num_stages=2)
    assert [names(run.batch) for run in simulation.runs] == list("abcbcbb")
    assert {served.finished_s for served in simulation.requests} == {simulation.ended_s}


def test_a_batch_is_those_that_fit_and_wait_when_the_last_has_ended():
    scheduler = make(3, num_blocks=10)
    for arguments in (("a", 2, 2), ("b", 2, 3), ("c", 1, 2), ("d", 1, 1)):
        scheduler.add(request(*arguments), 0)
    assert names(scheduler.next_batch(WORKER, 0)) == "ab", "c does not fit beside them, and d must not overtake it"


def test_a_stop_token_ends_a_request_and_not_its_batch():
    scheduler = make()
    scheduler.add(request("a", 1, 5, stops=[1]), 0)
    scheduler.add(request("b", 1, 2), 0)
    batch = scheduler.next_batch(WORKER, 0)
    assert scheduler.complete(batch, output(batch), 0) == []
    batch = scheduler.next_batch(WORKER, 0)
    left = {finished.request_id: finished.result for finished in scheduler.complete(batch, output(batch), 0)}
    assert (left["a"].finish_reason, left["b"].finish_reason) == ("stop", "length")
    assert [token.token_id for token in left["a"].tokens] == [1]


def test_a_cancelled_request_leaves_alone_and_may_end_the_batch():
    scheduler = make()
    for arguments in (("a", 1, 1), ("b", 1, 9)):
        scheduler.add(request(*arguments), 0)
    batch = scheduler.next_batch(WORKER, 0)
    scheduler.complete(batch, output(batch), 0)
    left = scheduler.cancel("b", 0)
    assert [(finished.request_id, finished.reason) for finished in left] == [
        ("b", FinishReason.CANCELLED),
        ("a", FinishReason.DONE),
    ]


def test_an_impossible_microbatch_is_refused():
    with pytest.raises(InvalidInputError, match="microbatch_size is 0"):
        make(microbatch_size=0)
