"""Work of requests: threads that it runs in beside the event loop, and its end when the client has left.

The event loop's thread serves every client, so work that grows with a request (bodies, rendering, tokenising, answers)
runs elsewhere. Large work has its own thread, one piece at a time, so that memory is bounded and small work does not
wait for megabytes.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlsys_serving.http.errors import ClientDisconnectedError

T = TypeVar("T")

LARGE = 64 * 1024  # bytes, characters or values from which on work is large


class RequestThreads:
    """A thread for large work, and threads for small work if the front wants any.

    Args:
        name: the beginning of the threads' names.
        num_small: threads for small work; 0 does it in the event loop's thread, where it takes a fraction of a
            millisecond.
    """

    def __init__(self, name: str, *, num_small: int = 0) -> None:
        self._small = ThreadPoolExecutor(num_small, thread_name_prefix=name) if num_small else None
        self._large = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-large")

    def close(self) -> None:
        """End the threads when their work is done. Idempotent."""
        for pool in (self._small, self._large):
            if pool is not None:
                pool.shutdown(wait=False)

    async def run(self, call: Callable[..., T], *args: Any, size: int = 0) -> T:
        """Return the result of ``call(*args)``, run in a thread that fits its size.

        Args:
            call: blocking work.
            args: its arguments.
            size: bytes, characters or values that it goes through; from :data:`LARGE` on it is large work.
        """
        pool = self._large if size >= LARGE else self._small
        if pool is None:
            return call(*args)
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(pool, partial(context.run, call, *args))

    def trim(self) -> None:
        """Return freed memory to the system, in the thread for large work."""
        try:
            self._large.submit(_trim)
        except RuntimeError:  # closed meanwhile
            return


def _trim() -> None:
    with_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give memory back by themselves
    if with_trim is not None:
        with_trim(0)


async def cancel_on_disconnect(request: Request, awaitable: Awaitable[T]) -> T:
    """Await ``awaitable``, but cancel it when the client of ``request`` goes away.

    The request's body must have been read before (FastAPI does so for handlers that declare it); the rest of it is
    discarded here.

    Returns:
        The awaitable's result.

    Raises:
        ClientDisconnectedError: the client has gone, and ``awaitable`` has been cancelled and has cleaned up. Let it
            pass: the app ends the request silently.

    Example:
        >>> async def handler(request: Request) -> str:
        ...     return await cancel_on_disconnect(request, asyncio.sleep(60, "slept well"))
    """
    work = asyncio.ensure_future(awaitable)
    gone = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        gone.result()  # raises if the rest of the body was refused
        raise ClientDisconnectedError
    finally:
        await _cancel(work, gone)


class ClosingStreamingResponse(StreamingResponse):
    r"""A streaming response that tells its generator at once when the client leaves, on every ASGI server.

    The generator is cancelled where it waits, or closed where it yields, so its ``finally`` blocks run there and then,
    and before the request counts as ended. Starlette's own leaves a generator that stands at a ``yield`` to the garbage
    collector. Same arguments; pass an asynchronous generator.

    Example:
        >>> async def tokens():
        ...     try:
        ...         yield "data: 1\n\n"
        ...     finally:
        ...         pass  # cancel the engine's request here
        >>> ClosingStreamingResponse(tokens(), media_type="text/event-stream").status_code
        200
    """

    async def stream_response(self, send: Send) -> None:
        """Send all chunks; close the generator in every case."""
        try:
            await super().stream_response(send)
        except OSError as error:  # ASGI 2.4: how a server's ``send`` says that nobody is there
            raise ClientDisconnectedError from error
        finally:
            close = getattr(self.body_iterator, "aclose", None)
            if close is not None:
                await close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        sending = asyncio.create_task(self.stream_response(send))
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                gone.result()
                raise ClientDisconnectedError
            sending.result()
        finally:
            await _cancel(sending, gone)
        if self.background is not None:
            await self.background()


async def _disconnect(receive: Receive) -> None:
    """Return when ``receive`` reports the disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*futures: asyncio.Future[Any]) -> None:
    """Cancel unfinished tasks and wait for their clean-up; their exceptions are dropped."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
