"""The body of a request without needless copies, and the news that its client has left, without a task per request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request

from mlsys_core.serving.http.errors import ClientDisconnectedError

T = TypeVar("T")

_ALIGNMENT = 64  # bytes; of the first tensor
_WATCH_AFTER_S = 0.02  # most answers are there before; until then nobody listens for the client's leave


async def body_of(request: Request, header_nbytes: int | None) -> memoryview:
    """The whole body, as sent.

    Args:
        request: nothing of its body has been read.
        header_nbytes: what follows so many bytes begins at a multiple of 64 in memory; None: all is JSON.

    Raises:
        ClientDisconnectedError: the client left before the body's end.
    """
    if header_nbytes is None:
        try:
            return memoryview(await request.body())
        except ClientDisconnect as error:
            raise ClientDisconnectedError from error
    declared = request.headers.get("content-length")  # the body limit has been applied to it
    buffer = _aligned(int(declared) if declared is not None else 0, header_nbytes)
    filled = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk = message.get("body", b"")
        end = filled + len(chunk)
        if end > len(buffer):  # a body of unknown length
            larger = _aligned(max(2 * len(buffer), end), header_nbytes)
            larger[:filled] = buffer[:filled]
            buffer = larger
        buffer[filled:end] = chunk
        filled = end
        if not message.get("more_body", False):
            return buffer[:filled].toreadonly()


def _aligned(nbytes: int, header_nbytes: int) -> memoryview:
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    address: int = room.__array_interface__["data"][0]
    start = -(address + header_nbytes) % _ALIGNMENT
    return room.data[start : start + nbytes]


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """``await work``, cancelled where it stands if the client of ``request`` leaves meanwhile; the body has been read.

    Raises:
        ClientDisconnectedError: it left, and ``work`` has cleaned up.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    watch: asyncio.Task[None] | None = None
    is_gone = False

    def on_watched(watched: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not watched.cancelled():
            watched.exception()  # what refused the rest of the body also ends the work
            is_gone = True
            task.cancel()

    def start_watch() -> None:
        nonlocal watch
        watch = loop.create_task(_disconnect(request))
        watch.add_done_callback(on_watched)

    timer = loop.call_later(_WATCH_AFTER_S, start_watch)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise ClientDisconnectedError from None
        raise
    finally:
        timer.cancel()
        if watch is not None:
            watch.remove_done_callback(on_watched)
            watch.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
