from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import BackgroundServer, ClosingStreamingResponse, Router, cancel_on_disconnect, runtime_of
from mlsys_serving.http.errors import ClientDisconnectedError
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect

RESPONSES = {"own": ClosingStreamingResponse, "starlette": StreamingResponse}
WAIT_S = 1200  # ends a hang; nothing is decided by it


class Probe:
    """Records of what handlers saw, passed to the test's thread."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.cancelled = threading.Event()
        self.router = Router()
        self.router.add_api_route("/work", self.work, methods=["GET", "POST"])
        self.router.add_api_route("/waiting/{kind}", self.waiting)
        self.router.add_api_route("/flooding/{kind}", self.flooding)
        self.router.add_api_route("/breaking/{media}", self.breaking)
        self.router.add_api_route("/background", self.background)

    async def _long_work(self) -> str:
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return "done"

    async def work(self, request: Request) -> str:
        return await cancel_on_disconnect(request, self._long_work())

    async def waiting(self, kind: str) -> StreamingResponse:
        async def chunks() -> AsyncIterator[str]:
            yield "data: 1\n\n"
            await self._long_work()

        return RESPONSES[kind](chunks(), media_type="text/event-stream")

    async def flooding(self, kind: str) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                for _ in range(100_000):  # never waits itself; an end for a server that would not stop it
                    yield b"x" * 100_000
                    self.running.set()
            finally:
                self.cancelled.set()

        return RESPONSES[kind](chunks())

    async def breaking(self, media: str) -> StreamingResponse:
        async def chunks() -> AsyncIterator[str]:
            yield "first\n\n"
            raise InvalidInputError("bad token") if media == "refused" else KeyError("secret")

        media_type = "application/octet-stream" if media == "bytes" else "text/event-stream"
        headers = {"content-length": "100"} if media == "length" else {}
        return StreamingResponse(chunks(), media_type=media_type, headers=headers)

    async def background(self) -> StreamingResponse:
        def fail() -> None:
            raise KeyError("after the answer")

        async def chunks() -> AsyncIterator[str]:
            yield "data: all\n\n"

        return StreamingResponse(chunks(), media_type="text/event-stream", background=BackgroundTask(fail))


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.mark.parametrize("path", ["/work", "/waiting/own", "/waiting/starlette", "/flooding/own"])
def test_work_stops_when_the_client_goes_away(
    path: str, probe: Probe, make_app: Any, serve: Any, dial: Any, log: Any
) -> None:
    server = serve(make_app(probe.router))
    with dial(server) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert probe.running.wait(WAIT_S)
        assert not probe.cancelled.is_set()
    assert probe.cancelled.wait(WAIT_S)
    server.stop()
    [line] = log.events("request")
    assert (line["status"], line["complete"]) == (499 if path == "/work" else 200, False)
    assert log.events("request failed") == []


def test_a_generator_that_never_waits_does_not_keep_the_server_busy_after_its_client(
    probe: Probe, make_app: Any, serve: Any, dial: Any, log: Any
) -> None:
    server = serve(make_app(probe.router))
    with dial(server) as sock:
        sock.sendall(b"GET /flooding/starlette HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert probe.running.wait(WAIT_S)
    assert httpx.get(f"{server.url}/health/live", timeout=WAIT_S).status_code == 200
    server.stop()
    [line] = [line for line in log.events("request") if line["route"] == "/flooding/{kind}"]
    assert line["complete"] is False


def test_the_rest_of_the_body_does_not_look_like_a_disconnect(
    probe: Probe, make_app: Any, serve: Any, dial: Any
) -> None:
    with dial(serve(make_app(probe.router))) as sock:
        sock.sendall(b"POST /work HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nhello")
        assert probe.running.wait(WAIT_S)
        sock.sendall(b"world")
        assert not probe.cancelled.wait(0.1)
    assert probe.cancelled.wait(WAIT_S)


async def test_cancel_on_disconnect_gives_results_and_errors_through() -> None:
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await never.wait()
        return {"type": "http.disconnect"}

    request = Request({"type": "http"}, receive)

    async def fail() -> None:
        raise InvalidInputError("own error")

    assert await cancel_on_disconnect(request, asyncio.sleep(0, "result")) == "result"
    with pytest.raises(InvalidInputError, match="own error"):
        await cancel_on_disconnect(request, fail())
    assert len(asyncio.all_tasks()) == 1  # the listener has ended too


async def test_cancel_on_disconnect_waits_for_the_clean_up_and_passes_its_own_cancellation_on() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("cleaned up")

    async def gone() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnectedError):
        await cancel_on_disconnect(Request({"type": "http"}, gone), work())
    assert ended == ["cleaned up"]

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    task = asyncio.create_task(cancel_on_disconnect(Request({"type": "http"}, never), work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cleaned up"] * 2
    assert len(asyncio.all_tasks()) == 1


async def test_a_server_whose_send_raises_closes_the_generator_at_once() -> None:
    closed: list[bool] = []

    async def chunks() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
        finally:
            closed.append(True)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("gone")  # ASGI 2.4

    with pytest.raises(ClientDisconnectedError):
        await ClosingStreamingResponse(chunks())({"type": "http"}, receive, send)
    assert closed == [True]


async def test_several_readers_all_learn_of_a_disconnect_that_is_told_once(make_app: Any, log: Any) -> None:
    router = Router()

    @router.get("/two")
    async def two(request: Request) -> None:
        await asyncio.gather(*(request.receive() for _ in range(3)))
        assert (await request.receive())["type"] == "http.disconnect"
        await cancel_on_disconnect(request, asyncio.Event().wait())

    said = False

    async def receive() -> dict[str, Any]:
        nonlocal said
        await asyncio.sleep(0.01)
        if said:
            await asyncio.Event().wait()
        said = True
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(f"nobody is there to read {message}")

    scope = {"type": "http", "method": "GET", "path": "/two", "query_string": b"", "headers": [], "root_path": ""}
    await asyncio.wait_for(make_app(router)(scope, receive, send), WAIT_S)
    [line] = log.events("request")
    assert (line["status"], line["complete"]) == (499, False)


def test_a_handler_that_reads_its_body_itself_may_let_the_disconnect_pass(
    make_app: Any, serve: Any, dial: Any, log: Any
) -> None:
    router, reading = Router(), threading.Event()

    @router.get("/read")
    async def read(request: Request) -> None:
        reading.set()
        await request.receive()
        raise ClientDisconnect

    app = make_app(router)
    server = serve(app)
    with dial(server) as sock:
        sock.sendall(b"GET /read HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert reading.wait(WAIT_S)
    while runtime_of(app).lifecycle.num_running:
        time.sleep(0.005)
    server.stop()
    assert log.events("request failed") == []


def test_a_client_that_leaves_in_the_middle_of_its_upload_is_no_error(
    make_app: Any, serve: Any, dial: Any, log: Any
) -> None:
    router = Router()

    @router.post("/upload")
    async def upload(body: dict[str, Any]) -> None:
        raise AssertionError("the body never came")

    app = make_app(router)
    server = serve(app)
    with dial(server) as sock:
        head = b"POST /upload HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
        sock.sendall(head + b"expect: 100-continue\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 100 ")  # the handler's side reads now
    while runtime_of(app).lifecycle.num_running:
        time.sleep(0.005)
    server.stop()
    [line] = log.events("request")
    assert (line["route"], line["status"]) == ("/upload", 499)
    assert log.events("request failed") == []


def test_an_exception_in_a_started_stream_is_logged_and_ends_it_with_an_event(
    probe: Probe, make_app: Any, serve: Any, log: Any
) -> None:
    server = serve(make_app(probe.router))
    response = httpx.get(f"{server.url}/breaking/sse")
    first, last, _ = response.text.split("\n\n")
    assert first == "first"
    assert '"code":"internal_error"' in last
    assert "secret" not in last
    assert '"code":"invalid_value","message":"bad token"' in httpx.get(f"{server.url}/breaking/refused").text
    server.stop()
    [event] = log.events("request failed")
    assert "KeyError: 'secret'" in event["exception"]


@pytest.mark.parametrize("media", ["bytes", "length"])
def test_an_exception_in_a_stream_that_takes_no_event_cuts_it(
    media: str, probe: Probe, make_app: Any, serve: Any, log: Any
) -> None:
    server = serve(make_app(probe.router))
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{server.url}/breaking/{media}")
    server.stop()
    assert not any("exception" in event for event in log.events("server"))  # nothing was sent beyond the length
    assert len(log.events("request failed")) == 1


def test_a_failing_background_task_is_logged_and_leaves_the_answer_whole(probe: Probe, make_app: Any, log: Any) -> None:
    with BackgroundServer(make_app(probe.router), drain_timeout_s=WAIT_S) as server:
        assert httpx.get(f"{server.url}/background").text == "data: all\n\n"
    [event] = log.events("request failed")
    assert "after the answer" in event["exception"]
    assert log.events("server") == []
