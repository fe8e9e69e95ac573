"""Work that ends with its client: told by the server's departure, or by ``receive`` on other servers."""

from __future__ import annotations

import asyncio
import json
import socket
from types import ModuleType
from typing import Any

import pytest
from mlsys_open_inference.rest.connection import while_connected
from mlsys_serving.http import BackgroundServer
from mlsys_serving.http.errors import ClientDisconnectedError
from mlsys_serving.http.protocol import Departure, attach_departure, departure_of
from mlsys_serving.http.record import RequestRecord, attach, record_of

from .test_engine import SLOW, until

NEVER_S = 3600


def _scope(departure: Departure | None = None) -> dict[str, Any]:
    scope: dict[str, Any] = {"type": "http"}
    attach(scope, RequestRecord(request_id="r", received_at=0.0))
    if departure is not None:
        attach_departure(scope, departure)
    return scope


async def _never() -> Any:
    await asyncio.Event().wait()


class _Work:
    """Work without end that notes its cancellation."""

    def __init__(self) -> None:
        self.started, self.was_cancelled = asyncio.Event(), False

    async def run(self) -> None:
        self.started.set()
        try:
            await asyncio.sleep(NEVER_S)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


@pytest.mark.parametrize("leaves", ["at work", "before it is watched"])
async def test_a_departure_cancels_the_work_without_a_reader(leaves: str) -> None:
    resumed: list[bool] = []
    departure, work = Departure(lambda: resumed.append(True)), _Work()
    scope = _scope(departure)

    async def receive() -> Any:
        raise AssertionError("nobody needs to read")

    running = asyncio.ensure_future(while_connected(scope, receive, work.run()))
    await work.started.wait()
    if leaves == "at work":
        while not resumed:  # from then on it is watched
            await asyncio.sleep(0.001)
    departure.note()
    with pytest.raises(ClientDisconnectedError):
        await running
    assert work.was_cancelled
    assert record_of(scope).disconnected.is_set()


async def test_without_a_departure_the_reader_tells() -> None:
    work = _Work()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnectedError):
        await while_connected(_scope(), receive, work.run())
    assert work.was_cancelled


async def test_results_errors_and_cancellations_from_elsewhere_pass() -> None:
    departure = Departure(lambda: None)
    scope = _scope(departure)
    assert await while_connected(scope, _never, asyncio.sleep(0.05, "late")) == "late"
    with pytest.raises(ZeroDivisionError):
        await while_connected(scope, _never, _fails())
    work = _Work()
    running = asyncio.ensure_future(while_connected(scope, _never, work.run()))
    await work.started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    departure.note()  # nobody is left who would hear of it
    assert not record_of(scope).disconnected.is_set()


async def _fails() -> None:
    await asyncio.sleep(0.03)
    raise ZeroDivisionError


def test_a_departure_calls_each_once_and_not_those_that_it_forgot() -> None:
    called: list[str] = []
    departure = Departure(lambda: None)
    kept, dropped = lambda: called.append("kept"), lambda: called.append("dropped")
    departure.watch(kept)
    departure.watch(dropped)
    departure.forget(dropped)
    departure.forget(dropped)
    departure.note()
    departure.note()
    departure.watch(lambda: called.append("late"))
    assert called == ["kept", "late"]
    assert departure_of({}) is None


def test_a_client_that_leaves_cancels_a_request_that_another_follows(make_app: Any, reference: ModuleType) -> None:
    model = reference.Add()
    body = json.dumps(SLOW)
    one = f"POST /v2/models/add/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    with BackgroundServer(make_app([model])) as server:
        with socket.create_connection((server.address.host, server.address.port)) as connection:
            connection.sendall(one.encode() * 2)
            until(lambda: len(model.requests) == 1)
        until(lambda: model.num_cancelled == len(model.requests))
