"""Detection of clients that have left, so that handlers stop working for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mlsys_serving.http.errors import ClientDisconnectedError

T = TypeVar("T")


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
