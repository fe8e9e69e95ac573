"""A model over several hosts, as processes on 127.0.0.1: one process's answers, to the bit; nodes may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.parallel.conftest import environment_here, ranks_of
from tests.orca.parallel.hosts.conftest import Nodes
from tests.orca.survival.clients import answers, bodies
from tests.processes import FAULT_S, await_ends

pytestmark = [pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())), pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed(start: Any) -> list[Any]:
    """Answers of one process."""
    with start() as server:
        return asyncio.run(answers(server.url, bodies(14)))


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2, "stages": 2, "speculate": 2},
        {"stages": 2, "replicas": 2, "policy": "paged", "kv_tokens": 160, "control_only": True},
    ],
)
def test_a_model_over_two_hosts_answers_as_one_process_to_the_bit(
    start_hosts: Any, undisturbed: list[Any], options: dict[str, Any]
) -> None:
    with start_hosts(2, **options) as server:
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
        assert server.metric("worker_deaths_total") == 0


@pytest.mark.parametrize("with_ranks", [False, True], ids=["node", "node and ranks"])
def test_a_node_that_falls_silent_under_load_changes_nothing(
    start_hosts: Any, undisturbed: list[Any], with_ranks: bool
) -> None:
    stopped: list[psutil.Process] = []
    with start_hosts(2, ranks=2, spares=1, may_lose=True, heartbeat=5.0, control_only=True) as server:

        def trouble() -> None:
            if not stopped:
                sitting = next(each for each in server.nodes.processes if ranks_of(each))
                stopped.extend([psutil.Process(sitting.pid), *(ranks_of(sitting) if with_ranks else ())])
                for each in stopped:
                    each.suspend()

        try:
            while True:  # the server is at work when it misses the node, however quickly it answers
                assert asyncio.run(answers(server.url, bodies(14), trouble)) == undisturbed
                if server.metric("worker_deaths_total") >= 1:
                    break
        finally:
            for each in stopped:  # the node joins anew, as a spare, if the server is still there
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.resume()


def test_a_node_that_is_killed_is_missed_and_the_next_goes_on(start_hosts: Any, undisturbed: list[Any]) -> None:
    with start_hosts(2, stages=2) as server:
        (node,) = server.nodes.processes
        hits: list[int] = []

        def trouble() -> None:
            if not hits:
                node.kill()
                hits.append(node.pid)

        async def all_of_it() -> list[Any]:
            asking = asyncio.create_task(answers(server.url, bodies(14), trouble))
            async with httpx.AsyncClient(timeout=None) as client:
                while True:
                    health = await client.get(f"{server.url}/health/ready")
                    if "1 of 2 nodes is missing" in health.text:
                        break
                    await asyncio.sleep(0.05)
            assert health.status_code == 503
            server.nodes.add()
            return await asking

        assert asyncio.run(all_of_it()) == undisturbed


def test_nobody_outlives_a_server_that_is_killed(start_hosts: Any, nodes: Nodes) -> None:
    with start_hosts(2, ranks=2) as server:
        (node,) = nodes.processes
        everyone = psutil.Process(server.process.pid).children(recursive=True)
        everyone += psutil.Process(node.pid).children(recursive=True)
        server.process.kill()
        assert node.wait(FAULT_S) != 0
        assert node.stdout is not None
        assert node.stdout.read().splitlines()[-1].startswith(f"error: the server at {nodes.address} is lost")
        assert not await_ends(everyone, timeout_s=FAULT_S)
        nodes.processes.clear()


def test_a_node_with_another_secret_or_model_is_refused_in_one_line(
    start_hosts: Any, nodes: Nodes, tmp_path: Path, six_layers: Path
) -> None:
    other = tmp_path / "six.gguf"
    changed = bytearray(six_layers.read_bytes())
    changed[-100:] = bytes(100)
    other.write_bytes(bytes(changed))
    with start_hosts(1) as server:
        stranger = nodes.add(other)
        assert stranger.wait(FAULT_S) != 0
        assert stranger.stdout is not None
        assert "install the same package and model on all hosts" in stranger.stdout.read().splitlines()[-1]
        nodes.secret.write_text("a secret of another run\n")
        stranger = nodes.add()
        assert stranger.wait(FAULT_S) != 0
        assert stranger.stdout is not None
        assert "both sides need the same secret" in stranger.stdout.read().splitlines()[-1]
        nodes.processes.clear()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_nodes_that_do_not_come_and_ports_in_use_are_told_in_one_line(six_layers: Path, nodes: Nodes) -> None:
    options = f'{{"stages": 2, "nodes": 2, "listen": "{nodes.address}", "secret": "{nodes.secret}", "join_timeout": 1}}'
    command = [sys.executable, str(Path(__file__).parents[1] / "server.py"), str(six_layers), options]
    environment = environment_here()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=FAULT_S)
    assert done.returncode == 2
    assert "1 of 2 nodes have joined" in done.stderr.strip().splitlines()[-1]
    done = subprocess.run(
        [*command[:-1], options.replace(nodes.address, "127.0.0.1:1")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert "127.0.0.1:1 cannot be listened at" in done.stderr.strip().splitlines()[-1] or os.geteuid() == 0


def test_a_node_that_nobody_waits_for_ends_with_one_line(nodes: Nodes) -> None:
    node = nodes.add(seconds=0.0)
    assert node.wait(FAULT_S) != 0
    assert node.stdout is not None
    (line,) = node.stdout.read().splitlines()
    assert line.startswith(f"error: nobody can be joined at {nodes.address}")
