"""A model of six layers, and servers over parts of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.orca.conftest import tiny_metadata, tiny_tensors, write_gguf
from tests.orca.survival.clients import Server

NUM_LAYERS = 6


@pytest.fixture(scope="session")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a Llama of six layers."""
    tensors = {}
    for layer in range(0, NUM_LAYERS, 2):
        for name, values in tiny_tensors(seed=layer).items():
            parts = name.split(".")
            if parts[0] == "blk":
                parts[1] = str(int(parts[1]) + layer)
            tensors[".".join(parts)] = values
    metadata = {**tiny_metadata(), "llama.block_count": NUM_LAYERS}
    return write_gguf(tmp_path_factory.mktemp("six") / "six.gguf", metadata, tensors)


@pytest.fixture(scope="session")
def start(six_layers: Path) -> Callable[..., Any]:
    """``with start(**options) as server``: see ``server.py``; nobody and no shared memory is left behind."""

    @contextmanager
    def started(**options: Any) -> Iterator[Server]:
        command = [sys.executable, str(Path(__file__).with_name("server.py")), str(six_layers), json.dumps(options)]
        before = set(Path("/dev/shm").iterdir())
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        children: list[psutil.Process] = []
        try:
            assert process.stdout is not None
            server = Server(process, int(process.stdout.readline()))
            while httpx.get(f"{server.url}/health", timeout=None).status_code != 200:
                time.sleep(0.01)
            yield server
        finally:
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
            _, alive = psutil.wait_procs(children, timeout=20)
            assert not alive
        assert set(Path("/dev/shm").iterdir()) <= before

    return started


def ranks_of(server: Server) -> list[psutil.Process]:
    """Return the ranks of all groups of a server, by age."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return sorted((each for each in found if each.name() == "mlsys-rank"), key=lambda each: each.pid)
