"""Reading a body without needless copies, and detecting that a client has left, without a task per request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import numpy as np
from mlsys_serving.http.errors import ClientDisconnectedError
from mlsys_serving.http.protocol import departure_of
from mlsys_serving.http.record import record_of
from starlette.types import Receive, Scope

T = TypeVar("T")

_ALIGNMENT = 64  # bytes; of the first tensor
_WATCH_AFTER_S = 0.02  # most answers are there before; until then nobody listens for the client's leave


async def body_of(receive: Receive, *, declared_nbytes: int, header_nbytes: int) -> memoryview:
    """Return the whole body, as sent.

    Args:
        receive: of a request whose body is unread.
        declared_nbytes: its ``Content-Length``, already checked against the limit; 0: not known.
        header_nbytes: length of the JSON at its start. If the body comes in more than one part, the data after the
            JSON begin at a multiple of 64 in memory, so that tensors need no second copy.

    Raises:
        ClientDisconnectedError: the client left before the body's end.
    """
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        return memoryview(message.get("body", b""))
    buffer = _aligned(declared_nbytes, header_nbytes)
    filled = 0
    while message["type"] != "http.disconnect":
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
        message = await receive()
    raise ClientDisconnectedError


def _aligned(nbytes: int, header_nbytes: int) -> memoryview:
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    address: int = room.__array_interface__["data"][0]
    start = -(address + header_nbytes) % _ALIGNMENT
    return room.data[start : start + nbytes]


async def while_connected(scope: Scope, receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``, cancelled where it stands if the client leaves meanwhile; the body has been read.

    Raises:
        ClientDisconnectedError: it left, and ``work`` has cleaned up.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    departure = departure_of(scope)
    watch: asyncio.Task[None] | None = None
    is_gone = False

    def give_up() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    def on_departure() -> None:
        record_of(scope).disconnected.set()
        give_up()

    def on_watched(watched: asyncio.Task[None]) -> None:
        if not watched.cancelled():
            watched.exception()  # an error on the rest of the body also ends the work
            give_up()

    def start_watch() -> None:
        nonlocal watch
        if departure is not None:
            departure.watch(on_departure)
            return
        watch = loop.create_task(_disconnect(receive))
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
        if departure is not None:
            departure.forget(on_departure)
        if watch is not None:
            watch.remove_done_callback(on_watched)
            watch.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
