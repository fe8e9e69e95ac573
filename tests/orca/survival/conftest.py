"""A server that tests start with what they want to befall it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.orca.conftest import tiny_metadata, tiny_tensors, write_gguf
from tests.orca.survival.clients import Server, answers, bodies
from tests.processes import await_ends, end
from tests.warm import Warm


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """``with start(**options) as server``: see ``server.py``."""

    model = write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", tiny_metadata(), tiny_tensors())
    warm = Warm("tests.orca.survival.server")

    @contextmanager
    def started(**options: Any) -> Iterator[Server]:
        process = warm.start(str(model), json.dumps(options))
        try:
            server = Server(process, int(process.stdout.readline()))
            children = []
            while httpx.get(f"{server.url}/health", timeout=None).status_code != 200:
                time.sleep(0.01)
            children = psutil.Process(process.pid).children(recursive=True)
            yield server
        finally:
            end(process)
            process.stdout.close()
        await_ends(children)  # nobody is left

    yield started
    warm.close()


@pytest.fixture(scope="session")
def undisturbed(start: Callable[..., Any]) -> list[Any]:
    """What an undisturbed server answers to two requests of each kind."""
    with start() as server:
        return asyncio.run(answers(server.url, bodies(14)))
