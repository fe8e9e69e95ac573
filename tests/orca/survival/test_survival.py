"""A live server whose workers die: no client notices, every answer is that of an undisturbed server, to the bit."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from mlsys_orca.engine.crash_points import STEPS
from mlsys_serving.processes import can_supervise

from tests.orca.survival.clients import answers, bodies, killer
from tests.processes import until

pytestmark = [pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())), pytest.mark.slow]


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("step", STEPS)
def test_a_worker_that_dies_at_any_step_changes_nothing(start: Any, undisturbed: list[Any], step: str, number: int):
    if step == "started" and number > 1:
        pytest.skip("a worker starts once")
    with start(step=step, number=number) as server:
        if (step, number) not in (("started", 1), ("received", 1)):  # before it is known to serve
            first = server.workers()[0].pid
            assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
            assert server.workers()[0].pid != first
        else:
            assert asyncio.run(answers(server.url, bodies(14))) == undisturbed


@pytest.mark.parametrize(("policy", "guesses"), [("paged", 0), ("orca", 0), ("request-level", 0), ("chunked", 4)])
def test_under_every_policy_with_hardly_any_memory(start: Any, undisturbed: list[Any], policy: str, guesses: int):
    with start(policy=policy, kv_tokens=160, speculate=guesses, step="computed", number=5) as server:
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed


def test_a_standby_goes_on_over_keys_and_values_in_int8(start: Any):
    with start(kv_dtype="int8", kv_tokens=160) as server:
        expected = asyncio.run(answers(server.url, bodies(14)))
        server.workers()[0].kill()
        assert asyncio.run(answers(server.url, bodies(14))) == expected
    with start(kv_dtype="int8", kv_tokens=160, step="computed", number=5) as server:
        assert asyncio.run(answers(server.url, bodies(14))) == expected


def test_a_policy_without_a_pool_begins_again_and_nothing_is_sent_twice(start: Any, undisturbed: list[Any]):
    with start(no_pool=True, step="computed", number=9) as server:
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed


def test_a_defect_of_the_scheduler_ends_a_worker_and_no_request(start: Any, undisturbed: list[Any]):
    with start(defect=9) as server:
        first = server.workers()[0].pid
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
        assert server.workers()[0].pid != first


def test_workers_killed_again_and_again_change_nothing(start: Any, undisturbed: list[Any]):
    rng = random.Random(1)
    with start(max_deaths=10_000) as server:
        for _ in range(3):
            kill = killer(server, rng)
            assert asyncio.run(answers(server.url, bodies(14), kill)) == undisturbed
            assert kill() > 0


def test_a_stopped_worker_is_replaced(start: Any, undisturbed: list[Any]):
    with start() as server:
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
        server.workers()[0].send_signal(signal.SIGSTOP)
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed


def test_a_poisoned_request_fails_alone(start: Any, undisturbed: list[Any]):
    poison = {"model": "tiny", "prompt": "CCC", "max_tokens": 30, "temperature": 0, "stream": True}
    with start(poison=2 + ord("C")) as server:
        found = asyncio.run(answers(server.url, [*bodies(14), poison]))
        assert found[:-1] == undisturbed
        assert server.metric("recomputed_tokens_total") == 0
        error = found[-1][-1]["error"]
        assert error["code"] == "engine_died"
        assert "2 times" in error["message"]
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed


def test_a_worker_out_of_memory_is_replaced(start: Any, undisturbed: list[Any]):
    greedy = {"model": "tiny", "prompt": "A", "max_tokens": 30, "temperature": 0, "stream": True}
    with start(memory=1 << 28) as server:
        found = asyncio.run(answers(server.url, [*bodies(14), greedy]))
        assert found[:-1] == undisturbed
        assert found[-1][-1]["error"]["code"] == "engine_died"


def test_a_server_that_cannot_live_says_so_and_ends(start: Any):
    with start(max_deaths=6) as server:
        while server.process.poll() is None:
            for worker in server.workers() if server.process.poll() is None else ():
                with suppress(psutil.NoSuchProcess):  # it may have died since it was listed
                    worker.kill()
            time.sleep(0.02)
        assert server.process.returncode == 71


def test_a_front_that_is_killed_comes_back(start: Any, undisturbed: list[Any]):
    with start() as server:
        (front,) = [child for child in psutil.Process(server.process.pid).children() if child.name() == "mlsys-front"]
        os.kill(front.pid, signal.SIGKILL)
        assert server.process.stdout is not None
        assert int(server.process.stdout.readline()) == server.port
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed


def test_clients_who_leave_leave_nothing_behind(start: Any, undisturbed: list[Any]):
    async def leave(url: str) -> None:
        async with httpx.AsyncClient(timeout=None) as client:
            for body in bodies(24):
                async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        break

    def used(url: str) -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("mlsys_orca_num_requests_unfinished{"))

    with start(step="sent", number=7) as server:
        asyncio.run(leave(server.url))
        until(lambda: not used(server.url))
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
