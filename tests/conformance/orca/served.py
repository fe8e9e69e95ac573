"""Requests served by a policy, in virtual time: an iteration takes a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlsys_core.loop import SimulatedExecutor, simulate
from mlsys_core.plugins import installed_plugins
from mlsys_orca.backends.native.decoder import new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.scheduling.batch import GenerationRequest, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler


@dataclass(frozen=True)
class Served:
    """Answers in the order of the prompts, and what is left of the run."""

    answers: list[tuple[SampledToken, ...]]
    pool: Any  # the scheduler's
    tables: BlockTables
    num_copies: int  # blocks that were copied to be written

    @property
    def token_ids(self) -> list[list[int]]:
        return [[token.token_id for token in answer] for answer in self.answers]


def serve(
    model: Any,
    policy: str,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    num_blocks: int,
    block_size: int = 16,
    num_states: int | None = None,
    kv_dtype: str | None = None,
    max_batch_size: int = 8,
    every_s: float = 2.0,
    max_in_flight: int = 1,
    prepare: Callable[[Any], None] = lambda pool: None,
    request: Callable[[int], dict[str, Any]] = lambda number: {},
    **options: Any,
) -> Served:
    """Serve the prompts, one more every ``every_s`` seconds, and check that all blocks are free in the end.

    Args:
        prepare: called with the scheduler's pool before the run.
        request: what a request has beside its prompt, by number.
        options: the policy's.
    """
    tables = BlockTables(num_blocks=num_blocks, block_size=block_size, num_states=num_states)
    scheduler: Any = make_scheduler(
        policy,
        installed_plugins().registry,
        block_tables=tables,
        max_batch_size=max_batch_size,
        max_model_len=128,
        options=options,
    )
    prepare(scheduler.pool)
    trace = [
        (
            every_s * number,
            GenerationRequest(
                **{"request_id": str(number), "prompt_token_ids": tuple(prompt), "max_new_tokens": num_tokens}
                | request(number)
            ),
        )
        for number, prompt in enumerate(prompts)
    ]
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_states": num_states or 1}
    cache = new_kv_cache(model, **sizes, dtype=kv_dtype)
    executor = SimulatedExecutor(lambda _: 1.0, Runner(model, cache).run, max_in_flight=max_in_flight)
    run = simulate(scheduler, executor, trace)
    assert tables.num_free_blocks == num_blocks
    answers = {each.request_id: each.finished.result.tokens for each in run.requests}
    num_copies = sum(len(each.batch.block_copies) for each in run.runs)
    return Served([answers[str(number)] for number in range(len(prompts))], scheduler.pool, tables, num_copies)
