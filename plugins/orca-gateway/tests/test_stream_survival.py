"""Streams whose server dies, wholly or its front alone: clients that come back get the rest, to the byte."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.survival.clients import Event, bodies, by_choice, read, read_to_the_end

pytestmark = [pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())), pytest.mark.slow]


def asked() -> list[tuple[str, dict[str, Any]]]:
    """Return streamed requests of every kind, with their paths."""
    more = {"stream_options": {"include_usage": True}}
    found = [("/v1/completions", body | more) for body in bodies(14) if body["stream"]]
    unseeded = {key: value for key, value in bodies(2)[1].items() if key != "seed"}
    return [*found, ("/v1/completions", unseeded), ("/v1/completions", found[0][1] | {"stop": ["e", "gg"]})]


@pytest.fixture(scope="module")
def streams(start: Callable[..., Any]) -> list[Any]:
    async def run(url: str) -> list[Any]:
        return await asyncio.gather(*(read_to_the_end(url, path, body) for path, body in asked()))

    with start() as server:
        return [by_choice(events) for events in asyncio.run(run(server.url))]


def equal_but_unseeded(found: list[list[Event]], streams: list[Any]) -> None:
    for (_, body), events, expected in zip(asked(), found, streams, strict=True):
        if "seed" in body:
            assert by_choice(events) == expected


async def all_of(url: str, trouble: Callable[[], None], num_events: int) -> list[list[Event]]:
    """Return all streams, and make trouble once, when clients have had so many events together."""
    num_left = num_events

    def count() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            trouble()

    found = await asyncio.gather(*(read_to_the_end(url, path, body, on_event=count) for path, body in asked()))
    assert num_left <= 0
    return found


def front_of(pid: int) -> psutil.Process:
    return next(child for child in psutil.Process(pid).children(recursive=True) if child.name() == "mlsys-front")


@pytest.mark.parametrize("num_events", [1, 20, 60])
def test_a_front_that_is_killed_changes_no_stream(start: Any, streams: list[Any], tmp_path: Path, num_events: int):
    with start(journal=str(tmp_path)) as server:
        front = front_of(server.process.pid)
        found = asyncio.run(all_of(server.url, front.kill, num_events))
        equal_but_unseeded(found, streams)
        front.wait()


@pytest.mark.parametrize(
    ("step", "number"),
    [("half appended", 1), ("half appended", 3), ("appended", 1), ("appended", 4), ("synced", 1), ("synced", 2)],
)
def test_a_front_killed_while_it_writes_changes_no_stream(
    start: Any, streams: list[Any], tmp_path: Path, step: str, number: int
):
    with start(journal=str(tmp_path), journal_step=step, number=number, sync="always") as server:
        front = front_of(server.process.pid)
        found = asyncio.run(all_of(server.url, lambda: None, 1))
        equal_but_unseeded(found, streams)
        assert front_of(server.process.pid).pid != front.pid


@pytest.mark.parametrize("num_events", [1, 3, 8])
def test_a_server_that_is_killed_goes_on_when_it_runs_again(
    start: Any, streams: list[Any], tmp_path: Path, num_events: int
):
    async def begin(url: str) -> list[list[Event]]:
        return await asyncio.gather(*(read(url, path, body, stop_at=num_events) for path, body in asked()))

    async def finish(url: str, begun: list[list[Event]]) -> list[list[Event]]:
        whole = zip(asked(), begun, strict=True)
        return await asyncio.gather(*(read_to_the_end(url, path, body, first) for (path, body), first in whole))

    with start(journal=str(tmp_path)) as server:
        begun = asyncio.run(begin(server.url))
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with start(journal=str(tmp_path)) as server:
        equal_but_unseeded(asyncio.run(finish(server.url, begun)), streams)
        again = asyncio.run(finish(server.url, begun))  # it is kept for a while: a client may come back once more
        equal_but_unseeded(again, streams)
    with start(journal=str(tmp_path)) as server:
        equal_but_unseeded(asyncio.run(finish(server.url, begun)), streams)


def test_a_torn_tail_is_cut_and_the_rest_goes_on(start: Any, streams: list[Any], tmp_path: Path):
    path, body = asked()[0]
    with start(journal=str(tmp_path)) as server:
        begun = asyncio.run(read(server.url, path, body, stop_at=4))
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    log = tmp_path / "journal.sqlite3-wal"
    log.write_bytes(log.read_bytes()[:-7])
    with start(journal=str(tmp_path)) as server:
        events = asyncio.run(read_to_the_end(server.url, path, body, begun))
        assert by_choice(events) == streams[0]


def test_who_comes_back_is_who_asked(start: Any, tmp_path: Path):
    path, body = asked()[0]
    with start(journal=str(tmp_path), api_keys=["one", "two"]) as server:
        with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer one"}) as one:
            event_id = one.post(path, json=body).text.split("\n")[0].removeprefix("id: ")
            key = event_id.partition(":")[0]
            rest = one.post(path, json=body, headers={"Last-Event-ID": event_id})
            assert rest.status_code == 200
            assert rest.text == one.get(f"/v1/streams/{key}").text.partition("\n\n")[2]
            other = one.post(path, json=body | {"max_tokens": 3}, headers={"Last-Event-ID": event_id})
            assert (other.status_code, other.json()["error"]["code"]) == (409, "stream_mismatch")
            bad = one.post(path, json=body, headers={"Last-Event-ID": "7"})
            assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_event_id")
        with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer two"}) as two:
            for answer in (
                two.post(path, json=body, headers={"Last-Event-ID": event_id}),
                two.get(f"/v1/streams/{key}"),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "stream_not_found")


def test_a_full_journal_refuses_new_streams_and_loses_none(start: Any, streams: list[Any], tmp_path: Path):
    path, body = asked()[0]
    with start(journal=str(tmp_path), journal_nbytes=40_000) as server:
        events = asyncio.run(read_to_the_end(server.url, path, body))
        assert by_choice(events) == streams[0]
        refused = httpx.post(server.url + path, json=body | {"prompt": "a" * 39_999, "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        metadata = {f"{number}": "x" * 500 for number in range(16)}
        codes = [httpx.post(server.url + path, json=body | {"metadata": metadata}).status_code for _ in range(8)]
        assert set(codes) == {200, 503}
        whole = httpx.post(server.url + path, json=body | {"stream": False, "stream_options": None})
        assert whole.status_code == 200  # what is not written down is served
        assert by_choice(asyncio.run(read_to_the_end(server.url, path, body, events[:2]))) == streams[0]


def test_a_response_in_the_background_outlives_the_server(start: Any, tmp_path: Path):
    body = {"model": "tiny", "input": "abba", "temperature": 0, "max_output_tokens": 60, "background": True}
    with start(journal=str(tmp_path)) as server:
        if httpx.post(f"{server.url}/v1/responses", json=body).status_code == 400:
            pytest.skip("the model has no chat template")
