"""A model over a Ray cluster of several nodes in one machine: a node is killed under load, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.survival.clients import Server, answers, bodies
from tests.processes import end

pytest.importorskip("ray", reason="Ray has no wheel for this Python or processor")
pytestmark = [
    pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())),
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
]
NODE = {"object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head of one core, where the server runs, and a node of three."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **NODE})
        cluster.add_node(num_cpus=3, **NODE)
        cluster.wait_for_nodes()
        yield cluster
        cluster.shutdown()


@pytest.fixture
def server(cluster: Any, six_layers: Path, tmp_path: Path) -> Iterator[Server]:
    """Two replicas of two stages over the cluster, one of them on both nodes; nobody is left behind."""
    command = [sys.executable, "-m", "mlsys_core.cli.main", "orca", "serve", str(six_layers), "--name", "tiny"]
    command += ["--executor", "ray", "--ray-address", cluster.address, "--listen", "127.0.0.1:0", "--port", "0"]
    command += ["--pipeline-parallel", "2", "--replicas", "2", "--dtype", "fp32", "--max-batch-size", "4"]
    command += ["--max-model-len", "96", "--heartbeat-timeout", "20"]
    words = tmp_path / "words"
    with words.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while (ready := re.search(r"tiny at http://127.0.0.1:(\d+)/v1", words.read_text())) is None:
            assert process.poll() is None, words.read_text()
            time.sleep(0.1)
        yield Server(process, int(ready[1]))
    finally:
        end(process)
        print(words.read_text())
    while node_processes():  # their actors end with the server's launcher
        time.sleep(0.1)


def node_processes() -> dict[int, int]:
    """Return the processes that actors have started, and those that they have forked: parents by process id."""
    found = {}
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "mlsys_ray.node" in each.cmdline():
                found[each.pid] = each.ppid()
    return found


def seated() -> set[int]:
    """Return the processes that actors have started."""
    found = node_processes()
    return {pid for pid, parent in found.items() if parent not in found}


def test_a_node_of_the_cluster_that_is_killed_under_load_changes_nothing(
    cluster: Any, start: Any, server: Server
) -> None:
    with start() as undivided:
        undisturbed = asyncio.run(answers(undivided.url, bodies(14)))
    nodes = list(cluster.worker_nodes)
    cluster.add_node(num_cpus=3, **NODE)
    before = seated()

    def trouble() -> None:
        """Lose a machine: all of its processes at once."""
        if nodes:
            lost = nodes.pop()
            processes = psutil.Process(lost.all_processes["raylet"][0].process.pid).children(recursive=True)
            for each in processes:
                each.kill()
            cluster.remove_node(lost, allow_graceful=False)

    assert len(before) == 4
    assert asyncio.run(answers(server.url, bodies(14), trouble)) == undisturbed
    assert not nodes
    server.await_metric("worker_deaths_total", 2)  # both replicas had a part there
    while len(seated()) < 4 or httpx.get(f"{server.url}/health/ready").status_code != 200:
        time.sleep(0.1)
    assert len(seated() & before) == 1
    assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
