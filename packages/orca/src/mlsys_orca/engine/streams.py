"""Streams of tokens from a loop's thread, or from a worker process, to the asynchronous fronts that read them.

Times and token counts are noted where a front reads its tokens, in the event loop's thread and never in the engine's,
but for the moment at which a request first runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import Finished, FinishReason
from mlsys_orca.scheduling.batch import (
    GenerationRequest,
    GenerationResult,
    IterationBatch,
    IterationOutput,
    SampledToken,
    ScoredPrompt,
)
from mlsys_serving.tracing import EngineTraces

if TYPE_CHECKING:
    from mlsys_orca.scheduling.batch import IterationBatch

# Seconds, as in vLLM's histograms.
_LATENCIES = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_BETWEEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


class Histogram:
    """Histogram: counts by upper bound; one list index per observation.

    Example:
        >>> histogram = Histogram((1.0, 2.0))
        >>> for value in (0.5, 1.5, 9.0):
        ...     histogram.observe(value)
        >>> histogram.buckets(), histogram.sum
        ([('1.0', 1), ('2.0', 2), ('+Inf', 3)], 11.0)
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, int]]:
        """Return (upper bound, values up to it), as Prometheus has them."""
        total, found = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class EngineStats:
    """Times and counts of one engine's requests."""

    def __init__(self) -> None:
        self.queue = Histogram(_LATENCIES)  # from submission to the first iteration
        self.first_token = Histogram(_LATENCIES)  # from submission
        self.between_tokens = Histogram(_BETWEEN)
        self.whole = Histogram(_WHOLE)  # from submission to the end
        self.num_prompt_tokens = 0
        self.num_new_tokens = 0
        self.finished: Counter[str] = Counter()  # by reason: stop, length, abort, error
        self.model = ""  # its name, for traces
        self.traces = EngineTraces(_members)
        self._submitted_s: dict[str, float] = {}  # of requests that have not run yet

    def submitted(self, request_id: str, num_prompt_tokens: int) -> float:
        """Note that a request was accepted; return the time, in seconds of the performance counter."""
        now = time.perf_counter()
        self._submitted_s[request_id] = now
        self.num_prompt_tokens += num_prompt_tokens
        return now

    def placed(self, request_id: str) -> None:
        """Note that a request is about to run for the first time. Called in the engine's thread."""
        submitted_s = self._submitted_s.pop(request_id, None)
        if submitted_s is not None:
            self.queue.observe(time.perf_counter() - submitted_s)

    def ended(self, request_id: str, reason: str, submitted_s: float) -> None:
        """Note that a request has left."""
        self._submitted_s.pop(request_id, None)
        self.finished[reason] += 1
        self.whole.observe(time.perf_counter() - submitted_s)


def _members(batch: IterationBatch) -> list[str]:
    return [part.request_id for part in batch.requests]


_log = logging.getLogger(__name__)


class Requests(Protocol):
    """Destination of requests: a serving loop in this process, or workers in others."""

    @property
    def num_unfinished(self) -> int:
        """Number of requests accepted that have not left."""
        ...

    def submit(self, request: GenerationRequest, request_id: str) -> None:
        """Accept ``request``; its tokens and its end are told to the streams."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ask for a request to leave; unknown and finished ids are ignored. From any thread."""
        ...


class PoisonedRequestError(ServingError):
    """A request that ended the engine twice, alone the second time."""

    error_code = "engine_died"

    def __init__(self, num_deaths: int) -> None:
        super().__init__(
            f"the engine died {num_deaths} times while it ran this request, the last time with no other beside it: it "
            "is not run again; please report it, with the request, if it should work"
        )


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """Beginning of an answer that an engine before this one gave."""

    tokens: tuple[SampledToken, ...] = ()
    scored: tuple[ScoredPrompt, ...] = ()  # of the prompt, if its log-probabilities were asked for


class TokenStream:
    """Stream of one request's log-probabilities of the prompt, tokens and result, as iterations complete.

    Under a policy that does not stream (``request-level``) all comes at once, right before the result. An asynchronous
    iterator for one reader; :meth:`close` it, which cancels the request if it has not finished.

    Args:
        request: The request.
        loop: Where it runs.
        streams: Where its tokens come from.
        stats: Times and counts, noted as it is read.
        known: Items that it gives first; the request goes on behind them.
    """

    def __init__(
        self,
        request: GenerationRequest,
        loop: Requests,
        streams: Streams,
        stats: EngineStats,
        known: KnownAnswer | None = None,
    ) -> None:
        self.request = request
        self._loop, self._streams, self._stats = loop, streams, stats
        self._items: asyncio.Queue[ScoredPrompt | SampledToken | Finished[Any]] = asyncio.Queue()
        self._num_tokens = self._num_known = 0
        self.tap: Callable[[ScoredPrompt | SampledToken], None] | None = None  # called with each item as it is read
        self._is_complete = False  # its last token has come
        self._is_closed = True  # until it has a sink: an id in use is another stream's
        streams.open(request.request_id, asyncio.get_running_loop(), self._items.put_nowait)
        self._is_closed = False
        self._trace = stats.traces.open(
            request.request_id,
            operation="generate",
            model=stats.model,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_new_tokens=request.max_new_tokens,
        )
        reason = None
        if known is not None:
            self._num_known = len(known.tokens)
            for scored in known.scored:
                self._items.put_nowait(scored)
            for token in known.tokens:
                self._items.put_nowait(token)
            reason = request.finish_reason(len(known.tokens), known.tokens[-1].token_id)
        try:
            if known is not None and reason is not None:
                result = GenerationResult(known.tokens, reason, known.scored)
                self._items.put_nowait(Finished(request.request_id, FinishReason.DONE, result))
            else:
                loop.submit(request, request.request_id)
        except BaseException:
            self._is_closed = True
            streams.close(request.request_id)
            stats.traces.close(request.request_id, "refused")
            raise
        self._submitted_s = self._last_s = stats.submitted(request.request_id, len(request.prompt_token_ids))

    @property
    def is_closed(self) -> bool:
        """True if its request has ended, as its reader knows, or was cancelled."""
        return self._is_closed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ScoredPrompt | SampledToken | GenerationResult:
        while not self._is_closed:
            item = await self._items.get()
            if isinstance(item, Finished):
                self._end(_reason_of(item))
                return _result_of(item)
            if isinstance(item, SampledToken):
                if self._is_complete:  # a right guess behind a stop token: no part of the answer
                    continue
                self._note(item)
            if self.tap is not None and (self._num_tokens > self._num_known or not self._num_known):
                self.tap(item)
            return item
        raise StopAsyncIteration

    def close(self) -> None:
        """Stop reading; what has not finished is cancelled within one iteration. Idempotent."""
        if not self._is_closed:
            self._loop.cancel(self.request.request_id)
            self._end("abort")

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):  # nobody came to read it
            self.close()

    def _end(self, reason: str) -> None:
        self._is_closed = True
        self._streams.close(self.request.request_id)
        self._stats.ended(self.request.request_id, reason, self._submitted_s)
        if self._trace is not None:
            self._trace.facts["gen_ai.usage.input_tokens"] = len(self.request.prompt_token_ids)
            self._trace.facts["gen_ai.usage.output_tokens"] = self._num_tokens
        if self._stats.traces:
            self._stats.traces.close(self.request.request_id, reason)

    def _note(self, token: SampledToken) -> None:
        now, stats = time.perf_counter(), self._stats
        if self._num_tokens >= self._num_known:
            (stats.between_tokens if self._num_tokens else stats.first_token).observe(now - self._last_s)
            stats.num_new_tokens += 1
            if self._trace is not None and self._trace.first_output_s is None:
                self._trace.first_output_s = now
        self._last_s = now
        self._num_tokens += 1
        request = self.request
        self._is_complete = token.token_id in request.stop_token_ids or self._num_tokens == request.max_new_tokens


def _reason_of(finished: Finished[Any]) -> str:
    if isinstance(finished.result, GenerationResult):
        return finished.result.finish_reason
    return "abort" if finished.reason is FinishReason.CANCELLED else "error"


def _result_of(finished: Finished[Any]) -> GenerationResult:
    if finished.reason is FinishReason.DONE and isinstance(finished.result, GenerationResult):
        return finished.result
    if isinstance(finished.error, InvalidInputError | PoisonedRequestError):
        raise finished.error
    if finished.reason is FinishReason.CANCELLED:
        raise ServingError("the server stopped before the answer was complete: try again")
    raise ServingError("the model failed on this request") from finished.error


class Streams:
    """Hands tokens from the loop's thread to the event loops that wait for them: one wake-up per iteration and loop."""

    def __init__(self) -> None:
        self.is_live = True  # False: tokens are handed over with their request's result, not as iterations complete
        self.tap: Callable[[IterationBatch, IterationOutput], None] | None = (
            None  # hears of each iteration that ran here
        )
        self._sinks: dict[str, tuple[asyncio.AbstractEventLoop, Callable[[Any], None]]] = {}

    def open(self, request_id: str, loop: asyncio.AbstractEventLoop, put: Callable[[Any], None]) -> None:
        """Have what comes for ``request_id`` put into ``loop`` by ``put``.

        Raises:
            InvalidInputError: the id is in use.
        """
        if request_id in self._sinks:
            raise InvalidInputError(f"request id {request_id!r} is in use")
        self._sinks[request_id] = loop, put

    def close(self, request_id: str) -> None:
        """Drop what comes for ``request_id`` from now on."""
        self._sinks.pop(request_id, None)

    def on_output(self, batch: IterationBatch | None, output: IterationOutput, now: float) -> None:
        """Deliver one iteration's tokens."""
        if (tap := self.tap) is not None and batch is not None:
            tap(batch, output)
        if not self.is_live:
            return
        deliveries: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        items: tuple[ScoredPrompt | SampledToken, ...] = output.sampled
        if output.scored:
            items = (*output.scored, *items)
        for token in items:
            sink = self._sinks.get(token.request_id)
            if sink is not None:
                deliveries.setdefault(sink[0], []).append(partial(sink[1], token))
        for loop, calls in deliveries.items():
            _call_soon(loop, calls)

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Deliver a request's end, after its tokens if those were held back."""
        sink = self._sinks.get(finished.request_id)
        if sink is not None:
            result = finished.result
            held_back: tuple[Any, ...] = ()
            if isinstance(result, GenerationResult) and not self.is_live:
                held_back = (*result.scored, *result.tokens)
            _call_soon(sink[0], [partial(sink[1], item) for item in (*held_back, finished)])


def _call_soon(loop: asyncio.AbstractEventLoop, calls: list[Callable[[], None]]) -> None:
    def run() -> None:
        for call in calls:
            call()

    try:
        if asyncio._get_running_loop() is loop:  # a front's own thread, to which worker processes have told it
            run()
        else:
            loop.call_soon_threadsafe(run)
    except RuntimeError:  # that event loop has been closed: nobody waits any more
        _log.debug("an event loop was closed before its tokens came")
