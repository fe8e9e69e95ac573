"""A live server of a divided model whose processes die: answers are those of an undisturbed one, nobody is left."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.parallel.conftest import ranks_of
from tests.orca.survival.clients import answers, bodies, name_of
from tests.processes import FAULT_S, await_ends, until

pytestmark = [pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())), pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed(start: Any) -> list[Any]:
    """Answers of one process."""
    with start() as server:
        return asyncio.run(answers(server.url, bodies(14)))


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2},
        {"ranks": 4, "policy": "paged", "kv_tokens": 160},
        {"stages": 2, "policy": "request-level"},
        {"stages": 3, "policy": "orca", "speculate": 3},
        {"ranks": 2, "stages": 2, "policy": "paged", "kv_tokens": 160, "speculate": 2},
        {"ranks": 2, "stages": 2, "replicas": 2},
    ],
)
def test_a_divided_model_answers_as_one_process_to_the_bit(
    start: Any, undisturbed: list[Any], options: dict[str, Any]
) -> None:
    with start(**options) as server:
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
        groups = options.get("replicas", 1) + 1
        assert len(ranks_of(server)) == options.get("ranks", 1) * options.get("stages", 1) * groups


def test_clients_are_told_that_the_parts_are_loading(start: Any, tmp_path: Path) -> None:
    with start(stages=2, gate=str(tmp_path / "gate")) as server:
        holders = psutil.Process(server.process.pid).children
        until(lambda: {name_of(each) for each in holders()} >= {"orca 0.0", "orca 1.0"})
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").json()["error"]["code"] == "loading"
        (tmp_path / "gate").touch()
        until(lambda: httpx.get(f"{server.url}/health").status_code == 200)


@pytest.mark.parametrize("step", ["started", "planned", "computed", "half sent", "sent"])
def test_a_master_that_dies_at_any_step_changes_nothing(start: Any, undisturbed: list[Any], step: str) -> None:
    with start(stages=2, step=step, number=1 if step == "started" else 4) as server:
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
        server.await_metric("worker_deaths_total", step != "started")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_ranks_that_die_or_stop_under_load_change_nothing(
    start: Any, undisturbed: list[Any], number: signal.Signals
) -> None:
    chance, num_hits, calls = random.Random(1), 0, count()
    # Who crashes twice without a token in between is given up, and so is who is killed four times.
    most, rounds = {signal.SIGKILL: (3, 1), signal.SIGSEGV: (1, 3), signal.SIGSTOP: (1, 1)}[number]

    def trouble() -> None:
        nonlocal num_hits
        if next(calls) % 20 == 0 and num_hits < most and (ranks := ranks_of(server)):
            chance.choice(ranks).send_signal(number)
            num_hits += 1

    with start(ranks=2, stages=2, max_deaths=10_000) as server:
        for _ in range(rounds):
            num_hits, calls = 0, count()
            assert asyncio.run(answers(server.url, bodies(14), trouble)) == undisturbed
            assert num_hits


def test_a_holder_that_dies_loads_its_part_again_and_keys_and_values_stay(start: Any, undisturbed: list[Any]) -> None:
    with start(ranks=2, stages=2, max_deaths=10_000) as server:
        holder = next(each for each in psutil.Process(server.process.pid).children() if each.name() == "orca 1.0")
        hits = []

        def trouble() -> None:
            if not hits:
                holder.kill()
                hits.append(holder.pid)

        assert asyncio.run(answers(server.url, bodies(14), trouble)) == undisturbed
        assert hits
        assert server.metric("recomputed_tokens_total") == 0


def test_a_poisoned_request_fails_alone(start: Any, undisturbed: list[Any]) -> None:
    poison = {"model": "tiny", "prompt": "CCC", "max_tokens": 30, "temperature": 0, "stream": True}
    with start(stages=2, poison=2 + ord("C"), max_deaths=10_000) as server:
        found = asyncio.run(answers(server.url, [*bodies(14), poison]))
        assert found[:-1] == undisturbed
        assert found[-1][-1]["error"]["code"] == "engine_died"
        assert server.metric("poisoned_requests_total") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nobody_outlives_a_server(start: Any, number: signal.Signals) -> None:
    with start(stages=3) as server:
        everyone = psutil.Process(server.process.pid).children(recursive=True)
        assert len(everyone) >= 3 + 3 + 6
        server.process.send_signal(number)
        assert not await_ends(everyone, timeout_s=FAULT_S)


def test_a_part_that_cannot_be_loaded_is_told_in_one_line_and_leaves_nobody(six_layers: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(six_layers, tmp_path / "copy.gguf"))
    command = [sys.executable, str(Path(__file__).with_name("server.py")), str(copy), '{"stages": 2, "missing": true}']
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "does not exist" in done.stderr
