"""Bubbles in a pipeline (ORCA, Figure 8): request-level batches as microbatches, and iteration-level batches.

A request-level engine has as many microbatches in flight as there are stages, and each takes no other request before
its last one has ended: where answers have different lengths, batches shrink and stages stand idle. At the iteration
level any request that is ready goes into the next batch. Both run through the same executors: in processes with the
real model, and in core's simulation with the seconds of a stage that were measured there. The bubble is the idle share
of the last stage, from its first iteration to its last.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlsys_core.config import settings
from mlsys_core.loop import SimulatedExecutor, simulate
from mlsys_core.models import resolve_model
from mlsys_core.plugins import installed_plugins
from mlsys_core.report import Section
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_orca.scheduling.request import GenerationRequest

from mlsys_bench.harness.text import rows_section
from mlsys_bench.orca.parallel import MAX_LEN, NUM_BLOCKS, Contestant, engines, requests_of, run_round

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

_BATCH = 4  # requests of an iteration: a microbatch
_POLICIES = ("request-level", "orca")


@dataclass(frozen=True, slots=True)
class Bubbles:
    """One policy in one pipeline."""

    where: str
    stages: int
    policy: str
    iterations: int
    seconds: float
    tokens_per_s: float
    bubble: float  # idle share of the last stage


def run(context: BenchContext, *, model: str, dtype: str | None = None, stages: tuple[int, ...] = (2, 3)) -> Section:
    """Return the section; 'failed' if the two policies give different tokens."""
    path = resolve_model(model, settings().cache_dir)
    requests = requests_of(24 if context.is_quick else 48, prompt=16, answer=64, spread=56)
    rows: list[Bubbles] = []
    is_equal = True
    with engines(path, [(1, count, 0) for count in stages], dtype=dtype, one_with=0) as contestants:
        for contestant in contestants:
            run_round(contestant, requests_of(4, prompt=16, answer=4), batch_size=_BATCH)  # warm-up
        for contestant in contestants:
            answers = []
            for policy in _POLICIES:
                rows.append(_measured(contestant, requests, policy))
                answers.append(contestant.answers)
            is_equal = is_equal and answers[0] == answers[1]
            seconds = statistics.median(done.run_s for done in contestant.dones)
            rows += [_simulated(contestant.stages, requests, policy, seconds) for policy in _POLICIES]
    text = (
        f"{len(requests)} requests of 16 tokens with answers of 8 to 64, {_BATCH} in a (micro)batch, as many "
        "batches in flight as stages."
    )
    return rows_section(
        "Orca: bubbles of a pipeline (the paper's Figure 8)", rows, text, status="ok" if is_equal else "failed"
    )


def _measured(contestant: Contestant, requests: list[GenerationRequest], policy: str) -> Bubbles:
    contestant.dones.clear()
    run_round(contestant, requests, policy=policy, batch_size=_BATCH)
    dones = contestant.dones[1:]  # before the first there was another round
    idle_s, run_s = sum(done.idle_s for done in dones), sum(done.run_s for done in dones)
    seconds = contestant.seconds[-1]
    return Bubbles(
        "processes",
        contestant.stages,
        policy,
        contestant.iterations[-1],
        seconds,
        contestant.num_tokens / seconds,
        idle_s / (idle_s + run_s),
    )


def _simulated(stages: int, requests: list[GenerationRequest], policy: str, stage_s: float) -> Bubbles:
    registry = installed_plugins().registry
    tables = BlockTables(num_blocks=NUM_BLOCKS)
    scheduler = make_scheduler(policy, registry, block_tables=tables, max_batch_size=_BATCH, max_model_len=MAX_LEN)

    def output_of(batch: IterationBatch) -> IterationOutput:
        return IterationOutput(tuple(SampledToken(part.request_id, 7) for part in batch.sampled))

    executor: SimulatedExecutor[Any, Any] = SimulatedExecutor(
        [lambda _: stage_s] * stages, output_of, max_in_flight=stages
    )
    trace = [(0.0, request) for request in requests]
    done = simulate(scheduler, executor, trace, request_id=lambda request: request.request_id)
    num_tokens = sum(request.max_new_tokens for request in requests)
    first_s = stage_s * (stages - 1)  # when the last stage begins
    bubble = 1 - len(done.runs) * stage_s / (done.ended_s - first_s)
    return Bubbles("simulation", stages, policy, len(done.runs), done.ended_s, num_tokens / done.ended_s, bubble)
