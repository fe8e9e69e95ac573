from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse
from mlsys_serving.http import HttpConfig, HttpError, Router, runtime_of
from mlsys_serving.http.middleware.supervisor import chosen_timeout_s

Check = Callable[[httpx.Response, int, str], dict[str, Any]]


@pytest.mark.parametrize(
    ("header", "default", "cap", "expected"),
    [
        (None, None, None, None),
        (None, 5, None, 5),
        (None, 5, 60, 5),
        ("2.5", None, None, 2.5),
        ("2.5", 5, None, 2.5),
        ("10", 5, None, 5),
        ("10", 5, 60, 10),
        ("1e3", 5, 60, 60),
    ],
)
def test_which_deadline_applies(
    header: str | None, default: float | None, cap: float | None, expected: float | None
) -> None:
    config = HttpConfig(request_timeout_s=default, max_request_timeout_s=cap)
    assert chosen_timeout_s(header, config) == expected


@pytest.mark.parametrize("header", ["", "0", "-1", "soon", "nan", "inf", "-inf", "1e999", "1,5"])
def test_a_bad_header_is_refused(header: str) -> None:
    with pytest.raises(HttpError, match="above 0"):
        chosen_timeout_s(header, HttpConfig())


class Handlers:
    """Handlers that wait for ever, and what became of them."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.num_begun = 0
        self.release = threading.Event()
        self.router = Router()
        self.router.add_api_route("/deadline", self.deadline)
        self.router.add_api_route("/wait", self.wait)
        self.router.add_api_route("/thread", self.thread)
        self.router.add_api_route("/stream/{kind}", self.stream)
        self.router.add_api_route("/stubborn", self.stubborn)
        self.router.add_api_route("/messy", self.messy)

    async def deadline(self, request: Request) -> float | None:
        deadline: float | None = request.state.deadline
        return deadline

    async def wait(self) -> None:
        self.num_begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("wait")

    def thread(self) -> str:
        self.num_begun += 1
        self.release.wait()
        self.ended.append("thread")
        return "late"

    async def stream(self, kind: str) -> StreamingResponse:
        async def chunks() -> AsyncIterator[str]:
            try:
                self.num_begun += 1
                yield "data: 1\n\n"
                await asyncio.Event().wait()
            finally:
                self.ended.append("stream")

        types = {"sse": "text/event-stream", "bytes": "application/octet-stream"}
        return StreamingResponse(chunks(), media_type=types[kind])

    async def stubborn(self) -> str:
        self.num_begun += 1
        while not self.release.is_set():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                self.release.set()
        return "too late"

    async def messy(self) -> None:
        self.num_begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("in the clean-up")


def timeouts() -> Iterator[tuple[float, dict[str, str]]]:
    """Yield deadlines, each longer, until one lets the handler begin on a machine however busy; and their headers."""
    for power in range(14):
        yield 0.05 * 2**power, {"x-request-timeout-s": f"{0.05 * 2**power:g}"}


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


async def test_the_deadline_is_given_in_the_apps_clock(handlers: Handlers, make_app: Any, client_of: Any) -> None:
    class Clock:
        def now(self) -> float:
            return 1000.0

    async with client_of(make_app(handlers.router, app={"clock": Clock()}, request_timeout_s=30)) as client:
        assert (await client.get("/deadline")).json() == 1030.0
        assert (await client.get("/deadline", headers={"x-request-timeout-s": "7.5"})).json() == 1007.5
        assert (await client.get("/deadline", headers={"x-request-timeout-s": "99"})).json() == 1030.0
    async with client_of(make_app(handlers.router)) as client:
        assert (await client.get("/deadline")).json() is None


async def test_a_bad_header_gives_400_in_the_shape(
    handlers: Handlers, make_app: Any, client_of: Any, check_error: Check
) -> None:
    async with client_of(make_app(handlers.router)) as client:
        response = await client.get("/deadline", headers={"x-request-timeout-s": "z" * 10_000})
    assert check_error(response, 400, "invalid_timeout")["param"] == "X-Request-Timeout-S"
    assert len(response.content) < 400


@pytest.mark.parametrize("by_header", [True, False])
async def test_a_request_past_its_deadline_is_cancelled_and_gets_504(
    by_header: bool, handlers: Handlers, make_app: Any, client_of: Any, check_error: Check, log: Any
) -> None:
    for timeout_s, headers in timeouts():
        app = make_app(handlers.router, request_timeout_s=3600 if by_header else timeout_s)
        async with client_of(app) as client:
            response = await client.get("/wait", headers=headers if by_header else {})
        assert f"{timeout_s:g} s" in check_error(response, 504, "deadline_exceeded")["message"]
        if handlers.num_begun:
            break
    assert handlers.ended == ["wait"]
    assert log.events("request")[-1]["status"] == 504
    assert log.events("request failed") == []
    assert runtime_of(app).lifecycle.num_running == 0


def test_the_answer_does_not_wait_for_a_thread_that_cannot_be_cancelled(
    handlers: Handlers, make_app: Any, serve: Any, check_error: Check
) -> None:
    server = serve(make_app(handlers.router))
    for _, headers in timeouts():
        check_error(httpx.get(f"{server.url}/thread", headers=headers), 504, "deadline_exceeded")
        if handlers.num_begun:
            break
    assert handlers.ended == []
    handlers.release.set()


async def test_a_handler_that_ignores_its_cancellation_sends_nothing(
    handlers: Handlers, make_app: Any, client_of: Any, check_error: Check, log: Any
) -> None:
    async with client_of(make_app(handlers.router)) as client:
        for _, headers in timeouts():
            check_error(await client.get("/stubborn", headers=headers), 504, "deadline_exceeded")
            if handlers.num_begun:
                break
    assert handlers.ended == ["cancelled"]
    assert log.events("clean-up failed") == []


async def test_an_error_in_the_clean_up_is_logged(
    handlers: Handlers, make_app: Any, client_of: Any, check_error: Check, log: Any
) -> None:
    async with client_of(make_app(handlers.router)) as client:
        for _, headers in timeouts():
            check_error(await client.get("/messy", headers=headers), 504, "deadline_exceeded")
            if handlers.num_begun:
                break
    [event] = log.events("clean-up failed")
    assert "in the clean-up" in event["exception"]


def test_a_stream_past_its_deadline_ends_with_an_error_event(
    handlers: Handlers, make_app: Any, serve: Any, log: Any
) -> None:
    server = serve(make_app(handlers.router))
    for _, headers in timeouts():
        response = httpx.get(f"{server.url}/stream/sse", headers=headers)
        if response.status_code == 200:
            break
    first, last, rest = response.text.split("\n\n")
    assert (response.status_code, first, rest) == (200, "data: 1", "")
    assert last.startswith('data: {"error":{"type":"server_error","code":"deadline_exceeded"')
    assert handlers.ended == ["stream"]
    server.stop()
    assert log.events("request")[-1]["complete"] is True


def test_a_stream_without_error_events_is_cut_so_that_the_client_sees_it(
    handlers: Handlers, make_app: Any, serve: Any, check_error: Check, log: Any
) -> None:
    server = serve(make_app(handlers.router))

    def ask() -> None:
        for _, headers in timeouts():
            check_error(httpx.get(f"{server.url}/stream/bytes", headers=headers), 504, "deadline_exceeded")

    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        ask()
    assert handlers.ended == ["stream"]
    server.stop()
    assert log.events("request")[-1]["complete"] is False
