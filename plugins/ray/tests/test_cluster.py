"""A model's ranks as actors on several nodes of a Ray cluster in one machine: one process's answers, to the bit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.survival.clients import Server, answers, bodies

from .serving import NODE, cluster_of, command, ranks_in, served

pytest.importorskip("ray", reason="Ray has no wheel for this Python or processor")
pytestmark = [
    pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())),
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for a stage, where the server runs, and a node for each of two stages."""
    with cluster_of(2, 2) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(start: Any) -> list[Any]:
    """Answers of one process."""
    with start() as server:
        return asyncio.run(answers(server.url, bodies(14)))


@pytest.fixture
def serve(cluster: Any, six_layers: Path, tmp_path: Path) -> Any:
    """``with serve("--tensor-parallel", "2") as server``: a server over the cluster; nobody is left behind."""

    @contextlib.contextmanager
    def start_server(*options: str) -> Iterator[Server]:
        arguments = command(six_layers, cluster.address, "--heartbeat-timeout", "20", *options)
        with served(arguments, tmp_path / "words") as server:
            yield server
        while ranks_in(cluster):  # they end with the server's keeper
            time.sleep(0.1)

    return start_server


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
