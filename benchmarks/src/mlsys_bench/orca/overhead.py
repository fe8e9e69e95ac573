"""Cost of an iteration outside the model: scheduler, batch, sampling, streams, and the loop around them.

    mlsys bench orca-overhead policies=orca batches=1,64 --threads 1

For each policy and batch size, that many requests decode together in a real engine with a real model, read by as many
asyncio clients. *Forward* is the time inside the model's own code (a native model's one call, else the module's);
*outside* is from the end of one forward to the start of the next. Both on the clock and in processor time of the
engine's thread: on a machine with other work only the second shows the code's cost, and the *share* is of it.
*Scheduler* is ``next_batch`` and ``complete`` by themselves, without an engine, while 1,000 more requests wait.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mlsys_core.config import settings
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import WorkerId
from mlsys_core.models import resolve_model
from mlsys_core.plugins import installed_plugins
from mlsys_core.report import Section, Table
from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler
from mlsys_orca.scheduling.request import GenerationRequest

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

PROMPT = 64  # tokens
NUM_WAITING = 1000


@dataclass(frozen=True, slots=True)
class Stamp:
    """One forward: wall and processor time in nanoseconds, and the batch it ran."""

    start_ns: int
    start_cpu_ns: int
    end_ns: int
    end_cpu_ns: int
    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Overhead:
    """Medians over iterations in which ``batch_size`` requests decode and nothing else runs."""

    policy: str
    batch_size: int
    num_iterations: int
    forward_s: float
    forward_cpu_s: float  # of the engine's thread, which is one of the model's team
    outside_s: float
    outside_cpu_s: float
    scheduler_s: float

    @property
    def share(self) -> float:
        """Share of an iteration spent outside the forward, in processor time."""
        return self.outside_cpu_s / (self.forward_cpu_s + self.outside_cpu_s)


class Stamped:
    """A function that records its times; ``before`` names the batch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.stamps: list[Stamp] = []
        self.batch: IterationBatch | None = None
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        assert self.batch is not None
        start_cpu_ns, start_ns = time.thread_time_ns(), time.perf_counter_ns()
        result = self._function(*args)
        end_ns, end_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        self.stamps.append(
            Stamp(start_ns, start_cpu_ns, end_ns, end_cpu_ns, len(self.batch.requests), self.batch.num_tokens)
        )
        return result


class Library:
    """A native library whose ``orca_run`` is stamped."""

    def __init__(self, library: Any, run: Stamped) -> None:
        self._library = library
        self.orca_run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def stamp_forward(engine: Engine) -> Stamped:
    """Record the engine's forwards: a native model's one call, else all of the module's."""
    runner = engine.core.runner
    if runner is None:
        raise InvalidInputError("a divided model runs in other processes: measure one in this process")
    if isinstance(runner.model, NativeDecoder):
        stamped = Stamped(runner.model._native.orca_run)
        runner.model._native = Library(runner.model._native, stamped)
    else:
        stamped = Stamped(runner.model)
        runner.model = _Model(runner.model, stamped)  # type: ignore[assignment]
    inputs = runner._inputs

    def noted(batch: IterationBatch) -> Any:
        stamped.batch = batch
        return inputs(batch)

    runner._inputs = noted  # type: ignore[method-assign]
    return stamped


class _Model:
    def __init__(self, model: Any, stamped: Stamped) -> None:
        self._model, self._stamped = model, stamped

    def __call__(self, *args: Any) -> Any:
        return self._stamped(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def requests_of(count: int, num_new: int, *, first: int = 0) -> list[GenerationRequest]:
    """Return greedy requests with prompts that share no block."""
    return [
        GenerationRequest(
            request_id=f"chatcmpl-{first + number:032x}",
            prompt_token_ids=tuple(range(1000 + first + number, 1000 + first + number + PROMPT)),
            max_new_tokens=num_new,
        )
        for number in range(count)
    ]


def stamps_of(
    loaded: LoadedModel, policy: str, batch_size: int, *, num_iterations: int, num_threads: int
) -> list[Stamp]:
    """Return the forwards of ``batch_size`` requests that decode together."""
    requests = requests_of(batch_size, num_iterations)
    config = EngineConfig(
        max_batch_size=batch_size, max_model_len=PROMPT + num_iterations, num_threads=num_threads, policy=policy
    )

    async def read(engine: Engine, request: GenerationRequest) -> None:
        async for _ in engine.generate(request):
            pass

    async def run(engine: Engine) -> None:
        await asyncio.gather(*(read(engine, request) for request in requests))

    engine = Engine(loaded, config, available_nbytes=2**34)
    stamped = stamp_forward(engine)
    with engine:
        asyncio.run(run(engine))
    return stamped.stamps


def scheduler_s(policy: str, batch_size: int, *, num_iterations: int) -> float:
    """Return the median seconds of ``next_batch`` and ``complete`` for ``batch_size`` decodes, while others wait."""
    tables = BlockTables(num_blocks=batch_size * (PROMPT + num_iterations) // 16 + batch_size)
    scheduler = make_scheduler(
        policy,
        installed_plugins().registry,
        block_tables=tables,
        max_batch_size=batch_size,
        max_model_len=PROMPT + num_iterations,
    )
    for request in requests_of(batch_size + NUM_WAITING, num_iterations):
        scheduler.add(request, 0.0)
    durations = []
    for number in range(num_iterations - 1):
        start = time.thread_time_ns()
        batch = scheduler.next_batch(WorkerId(0), 0.0)
        assert batch is not None
        between = time.thread_time_ns()
        output = IterationOutput(tuple(SampledToken(part.request_id, 7 + number) for part in batch.sampled))
        after = time.thread_time_ns()
        scheduler.complete(batch, output, 0.0)
        if batch.num_tokens == len(batch.requests) == batch_size:
            durations.append(time.thread_time_ns() - after + between - start)
    return statistics.median(durations) / 1e9


def measure(loaded: LoadedModel, policy: str, batch_size: int, *, num_iterations: int, num_threads: int) -> Overhead:
    """Return both measurements of one policy and batch size."""
    stamps = stamps_of(loaded, policy, batch_size, num_iterations=num_iterations, num_threads=num_threads)
    full = [stamp.num_requests == stamp.num_tokens == batch_size for stamp in stamps]
    pairs = [
        (before, after)
        for (before, after), both in zip(pairwise(stamps), map(all, pairwise(full)), strict=True)
        if both
    ]
    return Overhead(
        policy=policy,
        batch_size=batch_size,
        num_iterations=len(pairs),
        forward_s=statistics.median(after.end_ns - after.start_ns for _, after in pairs) / 1e9,
        forward_cpu_s=statistics.median(after.end_cpu_ns - after.start_cpu_ns for _, after in pairs) / 1e9,
        outside_s=statistics.median(after.start_ns - before.end_ns for before, after in pairs) / 1e9,
        outside_cpu_s=statistics.median(after.start_cpu_ns - before.end_cpu_ns for before, after in pairs) / 1e9,
        scheduler_s=scheduler_s(policy, batch_size, num_iterations=num_iterations),
    )


def run(
    context: BenchContext,
    *,
    model: str = "smollm2-135m-instruct",
    policies: tuple[str, ...] = ("orca", "paged", "chunked"),
    batches: tuple[int, ...] = (1, 8, 64),
    iterations: int = 64,
) -> Section:
    """Measure each policy at each number of requests an iteration.

    Args:
        context: The suite's context.
        model: A name from ``mlsys models list``, or a path.
        policies: Names.
        batches: Requests an iteration.
        iterations: Decoded tokens of each request.
    """
    loaded = load_model(resolve_model(model, settings().cache_dir))
    if context.is_quick:
        batches, iterations = batches[:1], 8
    measured = []
    for policy in policies:
        for batch_size in batches:
            with context.console.status(f"{policy}, batch {batch_size} ..."):
                measured.append(
                    measure(loaded, policy, batch_size, num_iterations=iterations, num_threads=context.num_threads)
                )
    columns = ["policy", "batch", "forward ms", "CPU ms", "outside us", "CPU us", "share", "scheduler us"]
    rows = [
        [
            each.policy,
            str(each.batch_size),
            *(f"{seconds * 1e3:.1f}" for seconds in (each.forward_s, each.forward_cpu_s)),
            *(f"{seconds * 1e6:.0f}" for seconds in (each.outside_s, each.outside_cpu_s)),
            f"{each.share:.1%}",
            f"{each.scheduler_s * 1e6:.0f}",
        ]
        for each in measured
    ]
    kind = "native" if isinstance(loaded.model, NativeDecoder) else "torch"
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    text = f"{loaded.name}, {dtype}, {kind}, {context.num_threads} threads, contexts of {PROMPT} tokens and more."
    data = {
        "model": loaded.name,
        "dtype": dtype,
        "kernels": kind,
        "num_threads": context.num_threads,
        "overheads": [{**asdict(each), "share": each.share} for each in measured],
    }
    return Section("Orca: cost outside the model", [text, Table(columns, rows)], data=data)
