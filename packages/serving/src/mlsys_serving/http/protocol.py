"""One connection of the HTTP server: uvicorn's on httptools, with bounds on the time and size of each part.

uvicorn waits without bound for a request that has begun to arrive and for a client that does not read its response, and
httptools keeps headers of any length. A connection here is always in one of these parts, each with a bound of its own:

    headers    from the connection, or the first byte of a further request: ``header_timeout_s``, MAX_HEADER_NBYTES
    body       from the last header: ``body_timeout_s``
    neither    a response runs, or the connection is idle (uvicorn's keep-alive timer)

and, beside them, ``write_timeout_s`` while the client takes no waiting output. Bytes that trickle in do not extend a
part's time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from mlsys_serving.http.config import MAX_HEADER_NBYTES, ConnectionLimits

_SCOPE_KEY = "mlsys.departure"


class Departure:
    """The end of one connection, and the callbacks that hear of it; in the event loop's thread.

    ASGI tells of it only to who awaits ``receive``, and a task that waits for each client costs more than its request:
    :class:`Connection` also leaves one of these in the scope of each request.

    Args:
        resume_reading: has the server read from the connection, without which it sees no end.

    Example:
        >>> departure = Departure(lambda: None)
        >>> departure.watch(lambda: print("gone"))
        >>> departure.note()
        gone
    """

    __slots__ = ("_callbacks", "_resume_reading", "has_left")

    def __init__(self, resume_reading: Callable[[], None]) -> None:
        self._resume_reading = resume_reading
        self._callbacks: list[Callable[[], None]] = []  # those of the requests that run: seldom more than one
        self.has_left = False

    def watch(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the client leaves; now, if it has left already."""
        if self.has_left:
            callback()
            return
        self._resume_reading()
        self._callbacks.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` no more; one that is unknown is ignored."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def note(self) -> None:
        """Call all callbacks, each once: the client has left."""
        self.has_left = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def attach_departure(scope: Any, departure: Departure) -> None:
    """Leave ``departure`` in the scope of a request."""
    scope[_SCOPE_KEY] = departure


def departure_of(scope: Any) -> Departure | None:
    """Return the departure of the request's client; None: the server tells it to who receives only."""
    departure: Departure | None = scope.get(_SCOPE_KEY)
    return departure


class _Part(Enum):
    HEADERS = "headers"
    BODY = "body"
    NEITHER = "neither"


async def _send_until_closed(cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any) -> None:
    """Send a part of a response to HTTP/1.0, which knows no chunks: without a length, the connection's end ends it."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
    elif cycle.expected_content_length > sys.maxsize // 2 and not message.get("more_body", False):
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


class Connection(HttpToolsProtocol):
    """One connection, until it is closed.

    Args:
        limits: its bounds, and the number of connections in the server's state.
        options: uvicorn's own arguments.
    """

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._part = _Part.HEADERS
        self._num_parts = 0  # begun so far: tells a part from the next of its kind
        self._timed_part: int | None = None  # the part that the timer is for
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._overhead_nbytes = 0  # received in this part, or since the last byte of its body
        self.has_received = False  # anything at all
        self._is_too_large = False  # the headers, as they came at once
        self._is_upgraded = False  # a WebSocket's protocol has taken the transport over
        self._departure: Departure | None = None  # of its client; there once the connection is made

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it if there are too many."""
        super().connection_made(transport)
        self._departure = Departure(self.flow.resume_reading)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "The server has too many connections; try again later.")
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget all timers."""
        self._stop_read_timer()
        self.resume_writing()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it running after an error
        if self._departure is not None:
            self._departure.note()

    def data_received(self, data: bytes) -> None:
        """Parse the data, then determine the part of the connection."""
        if self.transport.is_closing():
            return
        num_parts = self._num_parts
        self.has_received = True
        self._overhead_nbytes += len(data)
        super().data_received(data)
        if self._is_upgraded or self.transport.is_closing():
            return
        if self._part is _Part.NEITHER and self._is_idle:
            if self._num_parts == num_parts:
                self._begin(_Part.HEADERS)  # blank lines before a request: they do not hold a connection
            elif self.timeout_keep_alive_task is None:  # the rest of a body whose request had been answered
                self._keep_alive()
        if self._part is not _Part.NEITHER and self._overhead_nbytes > MAX_HEADER_NBYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The request's headers are too large.")
            return
        self._watch()

    def on_message_begin(self) -> None:
        """Note the first byte of a request."""
        super().on_message_begin()
        if self._departure is not None:
            attach_departure(self.scope, self._departure)
        if self._part is not _Part.HEADERS:  # else its time has begun before
            self._begin(_Part.HEADERS)

    def on_headers_complete(self) -> None:
        """Handle the last header; check the size of headers that came at once."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_NBYTES:
            self._is_too_large = True
            raise ValueError("too large")  # the parser stops, and uvicorn has it answered
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.send = partial(_send_until_closed, self.cycle, self.cycle.send)  # type: ignore[method-assign]
        self._begin(_Part.BODY)

    def on_body(self, body: bytes) -> None:
        """Note a piece of the body."""
        super().on_body(body)
        self._overhead_nbytes = 0

    def on_message_complete(self) -> None:
        """Note the last byte of a request."""
        super().on_message_complete()
        self._begin(_Part.NEITHER)

    def handle_websocket_upgrade(self) -> None:
        """Hand the transport over; the next protocol sets its own timers."""
        self._is_upgraded = True
        self._stop_read_timer()
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        """Bound the wait for the client if the connection ends now."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_unless_written()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._abort_unless_written()

    def pause_writing(self) -> None:
        """Give the client ``write_timeout_s`` to take some output."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the write timer: the client reads again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _is_idle(self) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def _keep_alive(self) -> None:
        """Start the timer of a connection that waits for its next request."""
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _begin(self, part: _Part) -> None:
        self._part = part
        self._num_parts += 1
        self._overhead_nbytes = 0

    def _watch(self) -> None:
        """Start the timer of a part that has begun; a request that came at once costs none."""
        if self._timed_part == self._num_parts:
            return
        self._stop_read_timer()
        self._timed_part = self._num_parts
        if self._part is not _Part.NEITHER:
            self._start_read_timer()

    def _start_read_timer(self) -> None:
        is_headers = self._part is _Part.HEADERS
        timeout_s = self._limits.header_timeout_s if is_headers else self._limits.body_timeout_s
        self._read_timer = self.loop.call_later(timeout_s, self._expire)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _expire(self) -> None:
        """End the connection of a client that was too slow."""
        self._read_timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # nobody reads here, so the client is not at fault
            self._start_read_timer()
        elif self._part is _Part.HEADERS and not self._is_idle:
            self.cycle.keep_alive = False  # the request before it is answered first
        elif not self.has_received or (self._part is _Part.BODY and self._is_idle):
            self._close()  # nobody waits for an answer
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"The request's {self._part.value} did not arrive in time.")

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer by hand and close; a request whose body is still awaited sees its client leave."""
        cycle = self.cycle
        has_begun = False
        if cycle is not None and not cycle.response_complete:
            has_begun = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        if not has_begun:
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            self.transport.write(f"{head}content-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode())
        self._close()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed; 431 where its size was the reason."""
        if self._is_too_large:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The request's headers are too large.")
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _close(self) -> None:
        self._stop_read_timer()
        self.transport.close()
        self._abort_unless_written()

    def _abort_unless_written(self) -> None:
        """Bound the time that a closed connection waits for its client to read the rest."""
        if self._write_timer is None and self.transport.get_write_buffer_size() > 0:
            self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)
