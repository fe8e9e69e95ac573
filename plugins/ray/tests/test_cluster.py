"""A model's ranks as actors on several nodes of a Ray cluster in one machine: one process's answers, to the bit."""

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
    """A head without room for a stage, where the server runs, and a node for each of two stages."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **NODE})
        for _ in range(2):
            cluster.add_node(num_cpus=2, **NODE)
        cluster.wait_for_nodes()
        yield cluster
        cluster.shutdown()


@pytest.fixture(scope="module")
def undisturbed(start: Any) -> list[Any]:
    """Answers of one process."""
    with start() as server:
        return asyncio.run(answers(server.url, bodies(14)))


@pytest.fixture
def serve(cluster: Any, six_layers: Path, tmp_path: Path) -> Any:
    """``with serve("--tensor-parallel", "2") as server``: a server over the cluster; nobody is left behind."""

    @contextlib.contextmanager
    def served(*options: str) -> Iterator[Server]:
        command = [sys.executable, "-m", "mlsys_core.cli.main", "orca", "serve", str(six_layers), "--name", "tiny"]
        command += ["--executor", "ray", "--ray-address", cluster.address, "--port", "0", "--dtype", "fp32"]
        command += ["--max-batch-size", "4", "--max-model-len", "96", "--heartbeat-timeout", "20", *options]
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
        while ranks_in(cluster):  # they end with the server's keeper
            time.sleep(0.1)

    return served


def ranks_in(cluster: Any) -> list[psutil.Process]:
    """Return the processes of rank actors."""
    found = []
    for node in cluster.list_all_nodes():
        for each in psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if each.cmdline()[0].startswith("ray::") and "RankActor" in each.cmdline()[0]:
                    found.append(each)
    return found


def workers_of(server: Server) -> list[psutil.Process]:
    """Return the server's masters."""
    everyone = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in everyone if each.name() == "mlsys-worker"]


def test_a_stage_that_is_parted_over_nodes_answers_as_one_process(serve: Any, undisturbed: list[Any]) -> None:
    with serve("--tensor-parallel", "2", "--threads", "2", "--speculate", "2") as server:
        assert asyncio.run(answers(server.url, bodies(14))) == undisturbed
        assert server.metric("worker_deaths_total") == 0


def test_ranks_masters_and_nodes_that_are_killed_under_load_change_nothing(
    cluster: Any, serve: Any, undisturbed: list[Any]
) -> None:
    with serve("--tensor-parallel", "2", "--pipeline-parallel", "2") as server:

        def asked(*killed: psutil.Process) -> list[Any]:
            left = list(killed)

            def trouble() -> None:
                while left:
                    left.pop().kill()

            return asyncio.run(answers(server.url, bodies(14), trouble))

        assert len(ranks_in(cluster)) == 4
        assert asked(ranks_in(cluster)[1]) == undisturbed
        assert asked(*workers_of(server)[:1]) == undisturbed
        cluster.add_node(num_cpus=2, **NODE)
        lost = cluster.worker_nodes.copy().pop()
        raylet = psutil.Process(lost.all_processes["raylet"][0].process.pid)
        assert asked(*raylet.children(recursive=True), raylet) == undisturbed
        cluster.remove_node(lost, allow_graceful=False)
        while len(ranks_in(cluster)) < 4 or httpx.get(f"{server.url}/health/ready").status_code != 200:
            time.sleep(0.1)
        assert asked() == undisturbed
