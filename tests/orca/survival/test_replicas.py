"""Several replicas behind one front: a death concerns the requests of its replica alone."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlsys_core.cli.main import run
from mlsys_core.errors import InvalidInputError
from mlsys_orca.engine.engine import Engine
from mlsys_orca.engine.settings import EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_serving.processes import can_supervise

from tests.orca.survival.clients import Server, answers, bodies, killer
from tests.processes import until

pytestmark = [pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())), pytest.mark.slow]
LONG = {"model": "tiny", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}


def test_the_death_of_a_replicas_worker_is_nothing_to_the_other(start: Any):
    asked = [LONG | {"prompt": "abcd"}, LONG | {"prompt": "dcba"}]
    with start() as server:
        expected = asyncio.run(answers(server.url, asked))
    with start(replicas=2, step="computed", number=9) as server:
        first, second, standby = server.workers()
        assert asyncio.run(answers(server.url, asked)) == expected
        now = {worker.pid for worker in server.workers()}
        assert first.pid not in now
        assert {second.pid, standby.pid} <= now
        assert (server.metric("worker_deaths_total"), server.metric("requests_resumed_total")) == (1, 1)
        assert server.metric("recomputed_tokens_total") == 0


@pytest.mark.parametrize("policy", ["chunked", "orca"])
def test_replicas_killed_again_and_again_change_nothing(start: Any, undisturbed: list[Any], policy: str):
    rng = random.Random(2)
    with start(replicas=3, policy=policy, max_deaths=10_000) as server:
        for _ in range(2):
            kill = killer(server, rng)
            assert asyncio.run(answers(server.url, bodies(14), kill)) == undisturbed
            assert kill() > 0


@pytest.mark.parametrize("policy", ["chunked", "paged", "orca", "request-level"])
def test_a_poisoned_request_costs_two_workers_of_its_replica_and_nobody_a_token(
    start: Any, undisturbed: list[Any], policy: str
):
    poison = LONG | {"prompt": "CCC"}
    with start(replicas=2, policy=policy, poison=2 + ord("C")) as server:
        found = asyncio.run(answers(server.url, [*bodies(14), poison]))
        assert found[:-1] == undisturbed
        assert found[-1][-1]["error"]["code"] == "engine_died"
        assert (server.metric("worker_deaths_total"), server.metric("recomputed_tokens_total")) == (2, 0)


@pytest.mark.parametrize("policy", ["chunked", "orca", "request-level"])
def test_a_suspect_runs_alone_with_hardly_any_memory(start: Any, undisturbed: list[Any], policy: str):
    poison = LONG | {"prompt": "CCC"}
    with start(policy=policy, kv_tokens=96, poison=2 + ord("C")) as server:
        found = asyncio.run(answers(server.url, [*bodies(14), poison]))
        assert found[:-1] == undisturbed
        assert found[-1][-1]["error"]["code"] == "engine_died"
        assert server.metric("worker_deaths_total") <= 2


def test_who_waits_too_long_for_a_standby_goes_to_another_replica(start: Any, undisturbed: list[Any]):
    day = 86_400.0  # no worker comes back
    with start(replicas=2, step="computed", number=9, num_immediate=0, backoff_s=day) as server:
        server.workers()[-1].kill()
        until(lambda: len(server.workers()) == 2)
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
        assert len(server.workers()) == 1
        assert server.metric("recomputed_tokens_total") > 0
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed


def test_a_prompt_goes_where_its_beginning_is_kept(start: Any):
    long = {"model": "tiny", "prompt": "abcdefgh" * 8, "max_tokens": 4, "temperature": 0}

    def cached(server: Server, prompt: str) -> int:
        usage = httpx.post(f"{server.url}/v1/completions", json=long | {"prompt": prompt}, timeout=None).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    with start(replicas=2, poison=2 + ord("C")) as server:
        first, second, _ = server.workers()
        assert cached(server, long["prompt"]) == 0
        assert cached(server, long["prompt"] + "x") >= 48
        body = long | {"prompt": "C" * 64}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=None).status_code == 500
        assert first.is_running()  # the other one got it
        assert second.pid not in {worker.pid for worker in server.workers()}
        assert cached(server, long["prompt"] + "y") >= 48


def test_a_replica_still_keeps_prompts_when_its_worker_is_dead(start: Any):
    body = {"model": "tiny", "prompt": "abcdefgh" * 8, "max_tokens": 4, "temperature": 0}
    with start() as server:
        found = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=None).json()]
        server.workers()[0].kill()
        server.await_metric("worker_deaths_total", 1)
        until(lambda: httpx.get(f"{server.url}/health", timeout=None).status_code == 200)
        found.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=None).json())
    assert found[0]["choices"] == found[1]["choices"]
    assert found[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48


def test_metrics_are_sums(start: Any):
    with start(kv_tokens=160) as one, start(kv_tokens=160, replicas=2) as two:
        assert two.metric("kv_blocks") == 2 * one.metric("kv_blocks") == 20


def test_one_process_has_one_replica(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["orca", "serve", str(tiny_gguf), "--replicas", "2", "--single-process"]) != 0
    assert "--replicas 2 needs a process for each" in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match="2 replicas"):
        Engine(load_model(tiny_gguf), EngineConfig(num_replicas=2), available_nbytes=1 << 28)
