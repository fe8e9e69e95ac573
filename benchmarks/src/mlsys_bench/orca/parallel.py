"""Engines of one model, whole or divided, that the same requests go through: what the suites on parallelism share.

Each engine is an executor; a fresh scheduler and loop run a round of requests through it. Holders are forked before
anything else has threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlsys_core.loop import Collector, InlineExecutor, ServingLoop, WallClock
from mlsys_core.plugins import installed_plugins
from mlsys_orca.backends.native.decoder import NativeDecoder, new_kv_cache
from mlsys_orca.backends.runner import Runner
from mlsys_orca.loading.load import load_model
from mlsys_orca.parallel.executor import ParallelExecutor
from mlsys_orca.parallel.group import Group, Holders
from mlsys_orca.parallel.messages import Done
from mlsys_orca.parallel.parts import divide
from mlsys_orca.parallel.wiring import GroupShape
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_orca.scheduling.request import GenerationRequest

NUM_BLOCKS, MAX_LEN = 256, 512
Tokens = dict[str, list[int]]


@dataclass
class Contestant:
    """One engine, and what its rounds gave."""

    name: str
    executor: Any
    ranks: int = 1
    stages: int = 1
    dones: list[Done] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each round
    iterations: list[int] = field(default_factory=list)
    num_tokens: int = 0  # generated in a round
    num_rows: int = 0  # tokens computed in a round
    answers: Tokens = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Seconds of a round."""
        return statistics.median(self.seconds)

    @property
    def num_sent_nbytes(self) -> int:
        """Bytes of control messages so far."""
        return self.executor.num_sent_nbytes if isinstance(self.executor, ParallelExecutor) else 0


def requests_of(number: int, *, prompt: int, answer: int, spread: int = 0) -> list[GenerationRequest]:
    """Return greedy requests; their answers have ``answer`` tokens, or up to ``spread`` fewer."""
    return [
        GenerationRequest(
            request_id=f"r{index}",
            prompt_token_ids=tuple((31 * index + 7 * at) % 30000 + 300 for at in range(prompt)),
            max_new_tokens=answer - (0 if spread == 0 else (index * 7919) % (spread + 1)),
            sampling=SamplingParams(),
        )
        for index in range(number)
    ]


def run_round(
    contestant: Contestant, requests: Sequence[GenerationRequest], *, policy: str = "orca", batch_size: int = 8
) -> None:
    """Run the requests, all there at once, through an engine; note its time and answers."""
    tables = BlockTables(num_blocks=NUM_BLOCKS)
    registry = installed_plugins().registry
    scheduler = make_scheduler(policy, registry, block_tables=tables, max_batch_size=batch_size, max_model_len=MAX_LEN)
    counted = _Counted(scheduler)
    collector: Any = Collector()
    loop: ServingLoop[Any, Any, Any] = ServingLoop(counted, contestant.executor, WallClock(), listener=collector)
    started_s = time.perf_counter()
    for request in requests:
        loop.submit(request, request.request_id)
    loop.drain()
    contestant.seconds.append(time.perf_counter() - started_s)
    results: dict[str, Any] = {name: finished.result for name, finished in collector.finished.items()}
    contestant.answers = {name: [token.token_id for token in result.tokens] for name, result in results.items()}
    contestant.num_tokens = sum(map(len, contestant.answers.values()))
    contestant.iterations.append(counted.num_batches)
    contestant.num_rows = counted.num_rows


class _Counted:
    """A scheduler whose batches are counted."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.num_batches = self.num_rows = 0

    def next_batch(self, worker: Any, now: float) -> Any:
        """See the scheduler."""
        batch = self._scheduler.next_batch(worker, now)
        if batch is not None:
            self.num_batches += 1
            self.num_rows += batch.num_tokens
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


@contextmanager
def engines(
    path: Path, degrees: Sequence[tuple[int, int, int]], *, dtype: str | None, one_with: int, rank_threads: int = 1
) -> Iterator[list[Contestant]]:
    """Return engines with so many (ranks, stages, iterations ahead), after one process with ``one_with`` threads.

    Args:
        path: The model.
        degrees: Of each divided engine.
        dtype: Of all.
        one_with: Threads of the one process; 0: leave it out.
        rank_threads: Of each rank.
    """
    with ExitStack() as stack:
        found = []
        for ranks, stages, ahead in degrees:
            loaded, parts = divide(path, tensor_parallel=ranks, pipeline_parallel=stages, dtype=dtype)
            holders = stack.enter_context(Holders(parts))
            holders.start()
            shape = GroupShape(
                tensor_parallel=ranks,
                pipeline_parallel=stages,
                max_in_flight=stages + ahead,
                max_tokens=NUM_BLOCKS * 16,
                max_rows=256,
                hidden_size=loaded.config.hidden_size,
                vocab_size=loaded.config.vocab_size,
                num_blocks=NUM_BLOCKS,
                num_threads=rank_threads,
            )
            name = f"TP {ranks}, PP {stages}" + (f", {ahead} ahead" if ahead else "")
            dones: list[Done] = []
            group = stack.enter_context(Group(holders, shape))
            executor = group.executor(on_done=dones.append)
            stack.callback(executor.close)
            executor.serve(0)
            found.append(Contestant(name, executor, ranks, stages, dones))
        if one_with:
            model: Any = load_model(path, dtype=dtype).model
            assert isinstance(model, NativeDecoder)
            model = model.with_threads(one_with)
            runner = Runner(model, new_kv_cache(model, num_blocks=NUM_BLOCKS))
            found.insert(0, Contestant(f"one process, {one_with} threads", InlineExecutor(runner.run)))
        yield found
