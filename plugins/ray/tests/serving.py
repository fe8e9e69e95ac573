"""Orca's server over a Ray cluster as tests start it, and the processes of its ranks."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.orca.survival.clients import Server
from tests.processes import end

NODE = {"object_store_memory": 80 << 20}  # of a node of a cluster in this machine


def command(model: Path, address: str, *options: str) -> list[str]:
    """Return the command of a server over the cluster at ``address``."""
    found = [sys.executable, "-m", "mlsys_core.cli.main", "orca", "serve", str(model), "--name", "tiny"]
    found += ["--executor", "ray", "--ray-address", address, "--port", "0", "--dtype", "fp32"]
    return [*found, "--max-batch-size", "4", "--max-model-len", "96", *options]


@contextlib.contextmanager
def cluster_of(*cores: int) -> Iterator[Any]:
    """Start a cluster in this machine: a head without room for a stage, and nodes of so many cores each."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        head = {"num_cpus": 1, "include_dashboard": False, **NODE}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for number in cores:
            cluster.add_node(num_cpus=number, **NODE)
        cluster.wait_for_nodes()
        try:
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def served(arguments: Sequence[str], words: Path, *, host: str = "127.0.0.1") -> Iterator[Server]:
    """Start a server, wait for its ranks, and end it; what it says is in ``words``."""
    with words.open("wb") as file:
        process = subprocess.Popen(arguments, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while (ready := re.search(rf"tiny at http://{host}:(\d+)/v1", words.read_text())) is None:
            assert process.poll() is None, words.read_text()
            time.sleep(0.1)
        yield Server(process, int(ready[1]), host)
    finally:
        end(process)
        print(words.read_text())


def ranks_below(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes of rank actors below a process."""
    found = []
    for each in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(each.cmdline()).startswith("ray::mlsys-rank of "):
                found.append(each)
    return found


def ranks_in(cluster: Any) -> list[psutil.Process]:
    """Return the processes of rank actors on a cluster's nodes."""
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
    return [rank for pid in raylets for rank in ranks_below(psutil.Process(pid))]
