"""The figures of the ORCA paper (dissertation, chapter 4), played by the scheduler that serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from mlsys_core.loop import SimulatedExecutor, Simulation, WorkerId, simulate
from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.orca import IterationScheduler

WORKER = WorkerId(0)


def orca(max_batch_size: int) -> IterationScheduler:
    return IterationScheduler(BlockTables(num_blocks=64), max_batch_size=max_batch_size, max_model_len=100)


def request(name: str, *, prompt: Sequence[int], new: int) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), max_new_tokens=new)


def output(batch: IterationBatch) -> IterationOutput:
    """A token that says where it stands: its position."""
    return IterationOutput(tuple(SampledToken(part.request_id, part.context_len) for part in batch.sampled))


def names(batch: IterationBatch | None) -> str:
    return "".join(part.request_id for part in batch.requests) if batch else ""


def pipeline(stages_s: Sequence[float], max_in_flight: int) -> SimulatedExecutor[IterationBatch, IterationOutput]:
    return SimulatedExecutor([lambda _, s=s: s for s in stages_s], output, max_in_flight=max_in_flight)


def iterations(simulation: Simulation[Any]) -> list[str]:
    return [names(run.batch) for run in simulation.runs]


def test_figure_3_an_early_finisher_leaves_at_once_and_its_place_is_taken():
    """x1 needs 4 iterations and x2 two: at iterations 3 and 4 the paper's baseline computes x2 in vain."""
    trace = [(0.0, request("1", prompt=[5, 6], new=4)), (0.0, request("2", prompt=[7, 8], new=2))]
    late = (1.5, request("3", prompt=[9], new=2))
    simulation = simulate(orca(2), pipeline([1.0], 1), [*trace, late])
    assert iterations(simulation) == ["12", "12", "13", "13"]
    assert [served.finished_s for served in map(simulation.__getitem__, "123")] == [4, 2, 4]


def test_figure_4_two_decodes_and_two_prompts_are_one_batch_of_seven_tokens():
    scheduler = orca(4)
    scheduler.add(request("1", prompt=[11, 12], new=9), 0)
    for name, prompt in (("2", [21]), ("3", [31, 32])):
        batch = scheduler.next_batch(WORKER, 0)
        scheduler.add(request(name, prompt=prompt, new=9), 0)  # arrives while the iteration runs
        scheduler.complete(batch, output(batch), 0)
    scheduler.add(request("4", prompt=[41, 42, 43], new=9), 0)
    batch = scheduler.next_batch(WORKER, 0)
    # x1 has run twice (x13, x14), x2 once (x22), x3 and x4 never.
    assert batch.token_ids == (3, 1, 31, 32, 41, 42, 43)
    assert batch.positions == (3, 1, 0, 1, 0, 1, 2)
    assert [(part.request_id, part.num_computed_tokens, part.context_len) for part in batch.requests] == [
        ("1", 3, 4),
        ("2", 1, 2),
        ("3", 0, 2),
        ("4", 0, 3),
    ]
    scheduler.complete(batch, output(batch), 0)  # x15, x23, x33, x44
    assert scheduler.next_batch(WORKER, 0).token_ids == (4, 2, 2, 3)


def test_figure_8a_three_workers_never_idle():
    """Six requests, three pipeline stages, max batch size 2: AB, CD, EF, then AB again as soon as it is back."""
    trace = [(0.0, request(name, prompt=[1], new=3)) for name in "ABCDEF"]
    simulation = simulate(orca(2), pipeline([1.0] * 3, 3), trace)
    assert iterations(simulation) == ["AB", "CD", "EF"] * 3
    for stage in range(3):
        busy = [run.stages_s[stage] for run in simulation.runs]
        assert busy == [(stage + i, stage + i + 1) for i in range(9)], "a worker was idle between two batches"


def test_section_4_2_arrival_order_decides_between_those_that_wait():
    """G arrives while AB, CD and EF are in flight: A and B are older, so G runs when one of the six has left."""
    trace = [(0.0, request(name, prompt=[1], new=2)) for name in "ABCDEF"]
    simulation = simulate(orca(2), pipeline([1.0] * 3, 3), [*trace, (0.5, request("G", prompt=[1], new=2))])
    assert iterations(simulation) == ["AB", "CD", "EF", "AB", "CD", "EF", "G", "G"]


@pytest.mark.parametrize(("max_in_flight", "ended_s"), [(1, 9.6), (2, 8.2)])
def test_one_more_batch_than_workers_hides_the_scheduling(max_in_flight: int, ended_s: float):
    """Section 4.4: with ``n_workers + 1`` in flight the next control message is there when the worker is free.

    One worker of 1 s per iteration, and 0.2 s of control before each: the executor's ``max_in_flight`` is all it takes.
    """
    trace = [(0.0, request(name, prompt=[1], new=4)) for name in "AB"]
    simulation = simulate(orca(1), pipeline([0.2, 1.0], max_in_flight), trace)
    assert simulation.ended_s == pytest.approx(ended_s)
    assert iterations(simulation) == (list("AAAABBBB") if max_in_flight == 1 else list("ABABABAB"))
