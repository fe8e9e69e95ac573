"""Troubles: workers killed again and again, slow readers, clocks that jump, no file descriptors left."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.server.test_chats import CALLS
from tests.orca.survival.clients import (
    MOST_KILLS,
    Server,
    answers,
    bodies,
    by_choice,
    calls,
    killer,
    read,
    read_to_the_end,
)
from tests.processes import until

pytestmark = [pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())), pytest.mark.slow]
_STORM_S = 15.0
_KILL_EVERY_S = 1.0
_LEAST_KILLS = 10


def test_a_storm_of_kills_under_mixed_streams_changes_nothing(start: Any) -> None:
    asked, rng, kills = [*bodies(24), *calls(8)], random.Random(0), list[int]()

    async def ask_through_the_storm(server: Server) -> list[list[Any]]:
        end_s, next_kill_s, found = time.monotonic() + _STORM_S, time.monotonic() + _KILL_EVERY_S, []
        most = MOST_KILLS

        def kill() -> None:
            nonlocal next_kill_s
            if time.monotonic() > next_kill_s and len(kills) < most:
                kills.extend(server.kill_worker(rng))
                next_kill_s = time.monotonic() + _KILL_EVERY_S

        while time.monotonic() < end_s or len(kills) <= _LEAST_KILLS:
            most = len(kills) + MOST_KILLS  # of one round, however long that takes
            found.append(await answers(server.url, asked, kill))
        return found

    with start(template=CALLS, max_deaths=10_000) as server:
        undisturbed = asyncio.run(answers(server.url, asked))
        assert any("tool_calls" in json.dumps(events) for events in undisturbed[-8:])
        for found in asyncio.run(ask_through_the_storm(server)):
            assert found == undisturbed


def test_who_reads_slowly_holds_up_nobody_and_gets_all_of_it(start: Any, undisturbed: list[Any]) -> None:
    slow = {"model": "tiny", "prompt": "ab", "n": 64, "max_tokens": 60, "logprobs": 5, "seed": 1, "stream": True}
    slow["ignore_eos"] = True

    async def read_slowly(url: str, has_begun: asyncio.Event, may_read: asyncio.Event) -> bytes:
        async with (
            httpx.AsyncClient(timeout=None) as client,
            client.stream("POST", f"{url}/v1/completions", json=slow) as response,
        ):
            has_begun.set()
            await may_read.wait()
            return b"".join([piece async for piece in response.aiter_raw()])

    async def run(server: Any) -> tuple[list[Any], bytes]:
        has_begun, may_read = asyncio.Event(), asyncio.Event()
        reading = asyncio.create_task(read_slowly(server.url, has_begun, may_read))
        await has_begun.wait()
        found = await answers(server.url, bodies(14), killer(server))
        may_read.set()
        return found, await reading

    with start(max_deaths=10_000) as server:
        found, text = asyncio.run(run(server))
        assert found == undisturbed
        assert text.endswith(b"data: [DONE]\n\n")
        quick = httpx.post(f"{server.url}/v1/completions", json=slow, timeout=None).content
        assert by_choice(events_in(text)) == by_choice(events_in(quick))


def events_in(text: bytes) -> list[tuple[str, str]]:
    return [("", event) for event in text.decode().split("\n\n") if event]


def test_a_clock_that_jumps_changes_nothing(start: Any, undisturbed: list[Any], tmp_path: Path) -> None:
    body = bodies(1)[0]
    with start(clock_jumps=True, journal=str(tmp_path)) as server:
        assert asyncio.run(answers(server.url, bodies(14), killer(server))) == undisturbed
        whole = asyncio.run(read_to_the_end(server.url, "/v1/completions", body))
        begun = asyncio.run(read(server.url, "/v1/completions", body, stop_at=2))
        server.process.kill()
        server.process.wait()
    with start(clock_jumps=True, journal=str(tmp_path)) as server:
        assert by_choice(asyncio.run(read_to_the_end(server.url, "/v1/completions", body, begun))) == by_choice(whole)


def test_a_worker_that_dies_while_clients_hold_all_files_is_replaced(start: Any, undisturbed: list[Any]) -> None:
    with start(num_files=128, max_deaths=6) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(250)]
        try:
            idle[-1].settimeout(120)
            assert idle[-1].recv(12) == b"HTTP/1.1 503"  # it is refused, and does not hang
            first = server.workers()[0]
            first.kill()
            until(lambda: len([worker for worker in server.workers() if worker.pid != first.pid]) >= 2)
        finally:
            for connection in idle:
                connection.close()
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
        assert server.process.poll() is None
        assert first.pid not in [worker.pid for worker in server.workers()]
