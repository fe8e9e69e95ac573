"""Clients that are slow, silent or too many: their connections end, others' do not."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import BackgroundServer, ConnectionLimits, Router
from mlsys_serving.http.config import MAX_HEADER_NBYTES

NEVER_S = 3600.0  # a time that does not pass in a test
SOON_S = 1.0
GET = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture
def router() -> Router:
    router = Router()

    @router.post("/length")
    async def length(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    @router.get("/large")
    async def large() -> Response:
        return Response(bytes(64 * 2**20))

    return router


@pytest.fixture
def serve_with(router: Router, make_app: Any, serve: Any) -> Callable[..., BackgroundServer]:
    """``serve_with(header_timeout_s=...)``; what is not given does not pass in a test."""

    def start(*, max_body_nbytes: int = 2**30, **limits: Any) -> BackgroundServer:
        names = ("header_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_timeout_s")
        connections = ConnectionLimits(**(dict.fromkeys(names, NEVER_S) | limits))
        server: BackgroundServer = serve(make_app(router, connections=connections, max_body_nbytes=max_body_nbytes))
        return server

    return start


def until_closed(sock: socket.socket) -> bytes:
    """Return all that still comes, up to the end of the connection."""
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionError:
        pass
    return data


def drip_until_closed(sock: socket.socket, pieces: Iterator[bytes]) -> bytes:
    """Send a piece now and then; ends only if the server closes the connection."""
    sock.settimeout(SOON_S / 10)
    data = b""
    for piece in pieces:
        try:
            sock.sendall(piece)
            part = sock.recv(65536)
        except TimeoutError:
            continue
        except ConnectionError:
            return data
        if not part:
            return data
        data += part
    raise AssertionError("unreachable: the pieces have no end")


def forever(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


def test_a_connection_that_sends_nothing_is_closed_without_a_word(serve_with: Any, dial: Any) -> None:
    with dial(serve_with(header_timeout_s=SOON_S)) as sock:
        assert until_closed(sock) == b""


def test_headers_that_trickle_in_do_not_hold_a_connection(serve_with: Any, dial: Any) -> None:
    server, answer = serve_with(header_timeout_s=SOON_S), b""
    while not answer:  # closed without a word: this thread was held up before its first byte
        with dial(server) as sock, suppress(ConnectionError):
            sock.sendall(GET)
            answer = drip_until_closed(sock, forever(b"x: y\r\n"))
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_blank_lines_do_not_hold_a_connection(serve_with: Any, dial: Any) -> None:
    server = serve_with(header_timeout_s=SOON_S)
    with dial(server) as sock:
        drip_until_closed(sock, forever(b"\r\n"))
    answer = b""
    while not answer:  # the same after a request, which was in time
        with dial(server) as sock, suppress(ConnectionError):
            sock.sendall(GET + b"\r\n")
            answer = sock.recv(65536)
            drip_until_closed(sock, forever(b"\r\n"))
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("head", "piece"),
    [(b"content-length: 1000000", b"x"), (b"transfer-encoding: chunked", b"1\r\nx\r\n")],
    ids=["length", "chunked"],
)
def test_a_body_that_trickles_in_gets_408(head: bytes, piece: bytes, serve_with: Any, dial: Any, log: Any) -> None:
    server = serve_with(body_timeout_s=SOON_S)
    with dial(server) as sock:
        sock.sendall(b"POST /length HTTP/1.1\r\nhost: localhost\r\n" + head + b"\r\n\r\n")
        answer = drip_until_closed(sock, forever(piece))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"\r\nconnection: close\r\n" in answer
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    assert "request failed" not in log.text, "a slow client is no failure of the server"


def test_the_rest_of_a_refused_body_does_not_hold_a_connection(serve_with: Any, dial: Any) -> None:
    with dial(serve_with(body_timeout_s=SOON_S)) as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 404 ")
        assert b" 408 " not in drip_until_closed(sock, forever(b"x")), "it has had its answer"


def test_an_answered_connection_whose_body_ends_late_becomes_idle_and_is_closed(serve_with: Any, dial: Any) -> None:
    with dial(serve_with(keep_alive_timeout_s=SOON_S)) as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\nx")
        assert sock.recv(65536).startswith(b"HTTP/1.1 404 ")
        sock.sendall(b"x")
        assert b"HTTP/1.1" not in until_closed(sock), "no second answer, only the rest of the first"


def test_an_idle_connection_is_closed(serve_with: Any, dial: Any) -> None:
    with dial(serve_with(keep_alive_timeout_s=SOON_S)) as sock:
        sock.sendall(GET + b"\r\n")
        assert until_closed(sock).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_is_cut(serve_with: Any, dial: Any, log: Any) -> None:
    with dial(serve_with(write_timeout_s=SOON_S)) as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        gone = threading.Event()
        threading.Thread(target=lambda: (_reset(sock), gone.set())).start()
        assert gone.wait(600)


def _reset(sock: socket.socket) -> None:
    """Wait for the server to cut the connection, without reading."""
    try:
        while True:
            sock.send(b"\r\n")
            threading.Event().wait(0.02)
    except OSError:
        return


def test_a_second_request_that_stalls_does_not_cost_the_first_its_answer(make_app: Any, serve: Any, dial: Any) -> None:
    begun, may_end = threading.Event(), threading.Event()
    router = Router()

    @router.get("/slow")
    def slow() -> dict[str, str]:
        begun.set()
        assert may_end.wait(600)
        return {"answer": "whole"}

    limits = ConnectionLimits(header_timeout_s=3 * SOON_S)
    server = serve(make_app(router, connections=limits))
    with dial(server) as sock, dial(server) as stalled:
        sock.sendall(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\nGET /slow HT")
        assert begun.wait(600)
        until_closed(stalled)  # it came later, so the first one's time has passed too
        may_end.set()
        assert b'{"answer":"whole"}' in until_closed(sock), "answered, then closed"


def test_a_client_whose_body_nobody_reads_is_not_at_fault(make_app: Any, serve: Any, dial: Any) -> None:
    begun, may_read = threading.Event(), threading.Event()
    router = Router()

    @router.post("/later")
    async def later(request: Request) -> dict[str, int]:
        begun.set()
        await asyncio.to_thread(may_read.wait)
        return {"length": len(await request.body())}

    server = serve(make_app(router, connections=ConnectionLimits(body_timeout_s=SOON_S)))
    answers: list[httpx.Response] = []
    body = bytes(8 * 2**20)  # more than sockets and buffers hold
    sending = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/later", content=body, timeout=None))
    )
    sending.start()
    assert begun.wait(600)
    with dial(server) as stalled:
        stalled.sendall(b"POST /later HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx")
        until_closed(stalled)  # it came later, so the first one's time has passed too
    may_read.set()
    sending.join()
    assert answers[0].json() == {"length": len(body)}


def test_all_of_many_stalled_connections_are_closed_and_others_are_served(serve_with: Any, dial: Any) -> None:
    server = serve_with(header_timeout_s=2.0)
    with ExitStack() as stack:
        stalled = [stack.enter_context(dial(server)) for _ in range(300)]
        for number, sock in enumerate(stalled):
            sock.settimeout(600)
            if number % 3:
                with suppress(ConnectionError):  # three hundred may take longer than the first has
                    sock.sendall(GET)
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        for sock in stalled:
            until_closed(sock)


def test_one_connection_too_many_gets_503_and_room_is_given_back(serve_with: Any, dial: Any) -> None:
    server = serve_with(max_connections=2)
    with dial(server) as first, dial(server) as second:
        for sock in (first, second):
            sock.sendall(GET + b"\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
        with dial(server) as third:
            assert until_closed(third).startswith(b"HTTP/1.1 503 ")
        first.sendall(GET + b"connection: close\r\n\r\n")
        until_closed(first)
        with dial(server) as fourth:
            fourth.sendall(GET + b"\r\n")
            assert fourth.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("in_pieces", [False, True])
def test_headers_without_end_get_431(in_pieces: bool, serve_with: Any, dial: Any) -> None:
    large = b"x" * (MAX_HEADER_NBYTES + 10)
    with dial(serve_with()) as sock:
        if in_pieces:
            sock.sendall(GET + b"x: " + large)  # and no end
            sock.sendall(large)
        else:
            sock.sendall(GET + b"x: " + large + b"\r\n\r\n")
        assert until_closed(sock).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "piece", [b"0\r\n" + b"x: " + b"y" * 70000, b"1;" + b"e" * 70000], ids=["trailer", "extension"]
)
def test_the_framing_of_a_body_is_bounded_too(piece: bytes, serve_with: Any, dial: Any) -> None:
    with dial(serve_with()) as sock:
        sock.sendall(b"POST /length HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(4):
                sock.sendall(piece)
        except ConnectionError:
            return  # closed while we sent
        assert until_closed(sock).startswith(b"HTTP/1.1 431 ")


def test_a_large_body_in_many_pieces_is_no_overhead(serve_with: Any, dial: Any) -> None:
    server = serve_with(body_timeout_s=NEVER_S)
    response = httpx.post(f"{server.url}/length", content=(bytes(1000) for _ in range(500)), timeout=600)
    assert response.json() == {"length": 500_000}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_connections", 0),
        ("max_connections", 1.5),
        ("header_timeout_s", 0),
        ("body_timeout_s", float("inf")),
        ("write_timeout_s", float("nan")),
        ("keep_alive_timeout_s", -1),
    ],
)
def test_limits_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError, match=field):
        ConnectionLimits(**{field: value})


def test_connections_leave_files_for_all_else() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        "import resource; from mlsys_serving.http.config import ConnectionLimits, within_open_files;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200));"
        "print(within_open_files(ConnectionLimits(max_connections=1000)).max_connections);"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]);"
        "print(within_open_files(ConnectionLimits(max_connections=50)).max_connections)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split() == ["104", "200", "50"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize(
    "pieces", [[], [b""], [b"a"], [b"a", b"", b"bc" * 70_000]], ids=["none", "empty", "one", "several"]
)
@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_responses_to_http_1_0_come_without_chunks(pieces, has_length, version, router, serve_with, dial) -> None:
    whole = b"".join(pieces)

    @router.api_route("/pieces", methods=["GET", "HEAD"])
    async def streamed() -> StreamingResponse:
        async def body() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return StreamingResponse(body(), headers={"content-length": str(len(whole))} if has_length else None)

    with dial(serve_with()) as sock:
        sock.sendall(b"GET /pieces HTTP/%s\r\nhost: localhost\r\nconnection: close\r\n\r\n" % version)
        head, _, body = until_closed(sock).partition(b"\r\n\r\n")
    is_chunked = version == b"1.1" and not has_length
    assert (b"transfer-encoding: chunked" in head) is is_chunked
    assert head.startswith(b"HTTP/1.1 200")
    assert (body == whole) is not is_chunked
    with dial(serve_with()) as sock:
        sock.sendall(b"HEAD /pieces HTTP/%s\r\nhost: localhost\r\nconnection: close\r\n\r\n" % version)
        assert until_closed(sock).endswith(b"\r\n\r\n")
