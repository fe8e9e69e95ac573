"""Head and body of a response in one write, and heads of streams that go alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from mlsys_serving.http import Router
from mlsys_serving.http.joined import JoinedWrites


class _Transport:
    """A transport that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def writelines(self, parts: list[bytes]) -> None:
        self.calls.append(tuple(parts))

    def close(self) -> None:
        self.calls.append("close")
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def _joined() -> tuple[_Transport, JoinedWrites]:
    transport = _Transport()
    return transport, JoinedWrites(transport, asyncio.get_running_loop())  # type: ignore[arg-type]


async def test_head_and_body_of_one_turn_are_one_write() -> None:
    transport, response = _joined()
    response.write(b"head")
    assert transport.calls == []
    response.write(b"body")
    response.write(b"more")
    await asyncio.sleep(0)
    assert transport.calls == [(b"head", b"body"), b"more"]


async def test_a_head_without_a_body_goes_alone_after_one_turn() -> None:
    transport, response = _joined()
    response.write(b"head")
    await asyncio.sleep(0)
    assert transport.calls == [b"head"]
    response.write(b"body")
    assert transport.calls == [b"head", b"body"]


async def test_a_close_writes_what_waits() -> None:
    transport, response = _joined()
    response.write(b"head")
    response.close()
    await asyncio.sleep(0)
    assert transport.calls == [b"head", "close"]


async def test_nothing_is_written_to_a_connection_that_the_server_closed() -> None:
    transport, response = _joined()
    response.write(b"head")
    transport.close()  # by a timer of the connection
    await asyncio.sleep(0)
    assert transport.calls == ["close"]
    assert response.is_closing()


def test_a_client_sees_the_head_of_a_stream_before_its_first_part(make_app: Any, serve: Any, dial: Any) -> None:
    router, first = Router(), asyncio.Event()

    @router.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            await first.wait()
            yield b"part"

        return StreamingResponse(parts())

    @router.get("/go")
    async def go() -> Response:
        first.set()
        return Response()

    server = serve(make_app(router))
    with dial(server) as waiting, dial(server) as other:
        waiting.sendall(b"GET /stream HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert waiting.recv(4096).endswith(b"\r\n\r\n")  # the head alone: nothing else comes before the other's request
        other.sendall(b"GET /go HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert _until_closed(waiting).endswith(b"part\r\n0\r\n\r\n")


def _until_closed(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(4096):
        data += part
    return data
