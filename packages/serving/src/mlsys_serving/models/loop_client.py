"""Client of a :class:`~mlsys_core.loop.ServingLoop` for coroutines: submit, await the result, cancel.

The loop's thread reports finished requests through its listener. One wake-up of the event loop delivers all that
finished since the last, so that a batch of many costs little more than one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Generic

from mlsys_core.errors import ServingError
from mlsys_core.loop.protocols import Batch, Finished, FinishReason, Output, Request
from mlsys_core.loop.serving_loop import ServingLoop

from mlsys_serving.models.errors import DeadlineExceededError
from mlsys_serving.tracing.record import EngineTraces


class LoopClient(Generic[Request, Batch, Output]):
    """The listener of a loop, with the methods that coroutines of one event loop call.

    Args:
        model: Name of the model, for traces.
        traces: Those that the loop notes batches in; None: requests are not traced.

    Example:
        >>> from mlsys_core.loop import InlineExecutor, ServeRequest, WallClock
        >>> from mlsys_core.loop.baselines import ZeroBatch
        >>> executor = InlineExecutor(lambda batch: [request.payload.upper() for request in batch.requests])
        >>> client = LoopClient()
        >>> async def main():
        ...     with ServingLoop(ZeroBatch(max_batch_size=8), executor, WallClock(), listener=client).start() as loop:
        ...         return await client.submit(loop, ServeRequest("a", "hello"), "a")
        >>> asyncio.run(main())
        'HELLO'
    """

    def __init__(self, *, model: str = "", traces: EngineTraces | None = None) -> None:
        self._model, self._traces = model, traces
        self._waiting: dict[str, asyncio.Future[Any]] = {}  # by request id; the event loop's thread
        self._finished: deque[Finished[Any]] = deque()  # from the serving loop's thread to the event loop's
        self._is_woken = False
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def submit(self, loop: ServingLoop[Request, Batch, Output], request: Request, request_id: str) -> Any:
        """Return the request's result. If this is cancelled, so is the request.

        Raises:
            DeadlineExceededError: it expired.
            ServingError: the loop is closed, or stopped before the request was done.
            InvalidInputError: ``request_id`` is in use.
            Exception: the error that the request failed with.
        """
        self._event_loop = asyncio.get_running_loop()
        future = self._event_loop.create_future()
        self._waiting.setdefault(request_id, future)  # before submit: the answer may come at once
        if self._traces is not None:
            self._traces.open(request_id, operation="infer", model=self._model)
        try:
            loop.submit(request, request_id)
            return await future
        except asyncio.CancelledError:
            loop.cancel(request_id)
            raise
        finally:
            if self._waiting.get(request_id) is future:
                del self._waiting[request_id]
            if self._traces:
                self._traces.close(request_id, "cancelled")  # unless it has ended by itself

    def on_output(self, batch: Batch, output: Output, now: float) -> None:
        """Ignore partial outputs: the client waits for the request's end."""

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Pass on a finished request; the serving loop calls this in its thread."""
        if self._traces:
            self._traces.close(finished.request_id, finished.reason.value)
        self._finished.append(finished)
        if not self._is_woken and self._event_loop is not None:
            self._is_woken = True
            try:
                self._event_loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop is closed: nobody waits
                self._finished.clear()

    def _deliver(self) -> None:
        self._is_woken = False  # first: what is appended from now on wakes again
        while self._finished:
            finished = self._finished.popleft()
            future = self._waiting.get(finished.request_id)
            if future is None or future.done():
                continue
            if finished.reason is FinishReason.DONE:
                future.set_result(finished.result)
            else:
                future.set_exception(_error(finished))


def _error(finished: Finished[Any]) -> BaseException:
    if finished.reason is FinishReason.EXPIRED:
        return DeadlineExceededError("the request's deadline passed before its result was there")
    if finished.reason is FinishReason.FAILED and finished.error is not None:
        return finished.error
    return ServingError(f"the request left the serving loop as {finished.reason.value}")
