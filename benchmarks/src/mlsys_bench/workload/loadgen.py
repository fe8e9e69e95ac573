"""The load generator: sends a trace to a target, open loop or closed loop, and records every request.

Open loop: each request starts at its own time in a task of its own, independent of the others, so a slow server
never slows the arrivals. Closed loop: ``concurrency`` clients take the items in order. All times are read from the
running event loop's clock and measured from the start of the run; sleeping ends up to a millisecond late, and a busy
machine adds to that: the lateness is measured, counted in the latencies, and warned of
(:func:`mlsys_bench.workload.tables.warnings_of`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import require_positive

from mlsys_bench.workload.arrivals import ClosedLoop, require_count
from mlsys_bench.workload.results import CANCELLED, LoadResult, RequestRecord
from mlsys_bench.workload.targets import Outcome, Target
from mlsys_bench.workload.trace import Trace, TraceItem


@dataclass(slots=True)
class LoadProgress:
    """Progress of a run; the generator updates it and passes it to ``on_progress`` after each change."""

    num_planned: int
    num_sent: int = 0
    num_done: int = 0  # failures included
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Settings of a run."""

    closed_loop: ClosedLoop | None = None  # None: open loop, each item at its arrival_s
    num_warmup: int = 0  # items sent one after another before the run, in none of its figures
    max_connections: int = 512  # requests outstanding at once; one that finds them all taken waits and is marked
    timeout_s: float = 600.0  # of each request, from sent to done
    name: str = "run"  # of the result, for tables and legends
    environment: Mapping[str, Any] = field(default_factory=dict)  # kept in the result

    def __post_init__(self) -> None:
        require_count("the number of warm-up requests", self.num_warmup, minimum=0)
        require_count("max_connections", self.max_connections)
        require_positive("the timeout", self.timeout_s)


async def run_load(
    trace: Trace,
    target: Target,
    *,
    options: LoadOptions | None = None,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> LoadResult:
    """Send every item of ``trace`` to ``target`` and wait until all have ended.

    Args:
        trace: requests to send, in order of arrival.
        target: their receiver; it is not closed.
        options: mode, limits, warm-up; without them, the open loop with the defaults of :class:`LoadOptions`.
        stop: set it to end the run early: nothing more is sent, outstanding requests are cancelled and recorded as
            ``"cancelled"``, and the partial result comes back with ``interrupted=True``.
        on_progress: called in the event loop as requests are sent and end; keep it short.

    Raises:
        InvalidInputError: the trace is empty, or has fewer items than ``options.num_warmup``.

    Example:
        >>> from mlsys_core.workload import ConstantRate, Constant, InProcessTarget, make_trace
        >>> trace = make_trace(ConstantRate(100), prompts=Constant(8), outputs=Constant(1), num_items=5, seed=0)
        >>> result = asyncio.run(run_load(trace, InProcessTarget(lambda item: asyncio.sleep(0.001))))
        >>> len(result.successes)
        5
    """
    options = options or LoadOptions()
    if not len(trace):
        raise InvalidInputError("the trace is empty: there is nothing to send")
    if options.num_warmup > len(trace):
        raise InvalidInputError(f"{options.num_warmup} warm-up requests asked for, the trace has {len(trace)}")
    stop = stop or asyncio.Event()
    run = _Run(target, options, LoadProgress(len(trace)), on_progress)
    warmup = _Run(target, options, LoadProgress(options.num_warmup))
    one_by_one = ClosedLoop(1)
    first = [dataclasses.replace(item, index=-1 - item.index) for item in trace.items[: options.num_warmup]]
    interrupted = not await _until_stopped(warmup.closed_loop(first, one_by_one), stop)
    if not interrupted:
        mode = run.closed_loop(trace, options.closed_loop) if options.closed_loop else run.open_loop(trace)
        interrupted = not await _until_stopped(mode, stop)
    return LoadResult(
        name=options.name,
        records=tuple(sorted(run.records, key=lambda record: record.index)),
        num_planned=len(trace),
        max_connections=options.max_connections,
        closed_loop=options.closed_loop,
        interrupted=interrupted,
        warmup=tuple(warmup.records),
        environment=options.environment,
        made_by=trace.made_by,
    )


def run_load_blocking(
    trace: Trace,
    target: Target,
    *,
    options: LoadOptions | None = None,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> LoadResult:
    """Run :func:`run_load` in an event loop of its own; close ``target`` at the end.

    In the main thread Ctrl-C ends the run early with the partial result; a second one raises ``KeyboardInterrupt``.
    """

    async def main() -> LoadResult:
        stop = asyncio.Event()
        try:
            with _stop_on_interrupt(stop):
                return await run_load(trace, target, options=options, stop=stop, on_progress=on_progress)
        finally:
            await target.aclose()

    return asyncio.run(main())


@contextlib.contextmanager
def _stop_on_interrupt(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    previous = signal.getsignal(signal.SIGINT)

    def restore() -> None:
        if loop.remove_signal_handler(signal.SIGINT):
            signal.signal(signal.SIGINT, previous or signal.SIG_DFL)

    def on_interrupt() -> None:
        stop.set()
        restore()  # so that a second Ctrl-C does what it always does

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    except NotImplementedError:  # this platform's loop has no signal handlers: Ctrl-C stays KeyboardInterrupt
        yield
        return
    try:
        yield
    finally:
        restore()


async def _until_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Run ``work`` to its end (True), or until ``stop`` is set, cancelling it (False)."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.wait({task, stopped})
    if task.cancelled():
        return False
    task.result()  # raises what a defect raised
    return True


def _ignore(progress: LoadProgress) -> None:
    del progress


class _Run:
    """One sending of a list of items: its clock's origin, its connection slots, its records."""

    def __init__(
        self,
        target: Target,
        options: LoadOptions,
        progress: LoadProgress,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._target = target
        self._timeout_s = options.timeout_s
        self._slots = asyncio.Semaphore(options.max_connections)
        self._progress = progress
        self._on_progress = on_progress or _ignore
        self._clock = asyncio.get_running_loop().time
        self._origin_s = 0.0

    def _now(self) -> float:
        return self._clock() - self._origin_s

    async def open_loop(self, items: Iterable[TraceItem]) -> None:
        """Start each item at its ``arrival_s``; wait for all."""
        self._origin_s = self._clock()
        async with asyncio.TaskGroup() as requests:
            for item in items:
                await asyncio.sleep(max(0.0, item.arrival_s - self._now()))
                requests.create_task(self._send(item, item.arrival_s))

    async def closed_loop(self, items: Iterable[TraceItem], mode: ClosedLoop) -> None:
        """Let ``mode.concurrency`` clients take items in order, each one at a time."""
        self._origin_s = self._clock()
        queue = deque(items)

        async def client() -> None:
            while queue:
                await self._send(queue.popleft(), self._now())
                if queue:
                    await asyncio.sleep(mode.think_time_s)

        async with asyncio.TaskGroup() as clients:
            for _ in range(mode.concurrency):
                clients.create_task(client())

    async def _send(self, item: TraceItem, scheduled_s: float) -> None:
        """Send one item and record its end, cancellation included; raise nothing but that."""
        waited = self._slots.locked()
        sent_s: float | None = None
        token_s: list[float] = []
        outcome = Outcome(error=CANCELLED, detail="the run was stopped")  # unless it gets further
        try:
            async with self._slots:
                self._progress.num_sent += 1
                self._on_progress(self._progress)
                sent_s = self._now()
                outcome = await self._outcome(item, token_s)
        finally:
            done_s = self._now()
            self._record(item, outcome, scheduled_s, done_s if sent_s is None else sent_s, done_s, token_s, waited)

    async def _outcome(self, item: TraceItem, token_s: list[float]) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._target.send(item, lambda: token_s.append(self._now()))
        except TimeoutError as error:
            return Outcome(
                error="timeout", detail=f"no end in {self._timeout_s:g} s" if limit.expired() else str(error)
            )
        except Exception as error:  # noqa: BLE001 - the request's boundary: kept in its record
            return Outcome(error=type(error).__name__, detail=str(error))

    def _record(
        self,
        item: TraceItem,
        outcome: Outcome,
        scheduled_s: float,
        sent_s: float,
        done_s: float,
        token_s: list[float],
        waited: bool,
    ) -> None:
        num_output = outcome.num_output_tokens
        if num_output is None and token_s:
            num_output = len(token_s)
        record = RequestRecord(
            index=item.index,
            scheduled_s=round(scheduled_s, 6),  # microseconds, here and below: what a saved result keeps is exact
            sent_s=round(sent_s, 6),
            done_s=round(done_s, 6),
            token_s=tuple(round(time_s, 6) for time_s in token_s),
            num_input_tokens=item.num_input_tokens if outcome.num_input_tokens is None else outcome.num_input_tokens,
            num_output_tokens=num_output,
            num_planned_tokens=item.num_output_tokens,
            http_status=outcome.http_status,
            error=outcome.error,
            detail=outcome.detail,
            waited_for_connection=waited,
            output=outcome.output,
        )
        self.records.append(record)
        self._progress.num_done += 1
        self._progress.num_failed += not record.ok
        self._on_progress(self._progress)
