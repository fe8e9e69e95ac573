"""Adapters outlive workers, and so do the requests under them."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.conftest import tiny_metadata, tiny_tensors, write_gguf
from tests.orca.survival.clients import Server, answer
from tests.orca.survival.commands import Served, served
from tests.processes import until

pytestmark = [pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())), pytest.mark.slow]
NAMES = ("tiny", "start", "later")
KILL_AT = (5, 60, 120)  # events, of 200


@pytest.fixture(scope="module")
def made() -> ModuleType:
    path = Path(__file__).parents[1] / "test_adapters.py"
    spec = importlib.util.spec_from_file_location("orca_test_adapters", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(tmp_path: Path, made: ModuleType) -> list[str]:
    model = write_gguf(tmp_path / "tiny.gguf", tiny_metadata() | {"llama.context_length": 1024}, tiny_tensors())
    for seed, name in enumerate(("start", "later")):
        made.write_adapter(tmp_path / name, seed, list(made.PRODUCTS))
    adapters = [f"--adapter={name}={tmp_path / name}" for name in ("start", "later")]
    return [str(model), "--name", "tiny", "--dtype", "fp32", *adapters]


def body(model: str) -> dict[str, Any]:
    fields = {"temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 2}
    return {"model": model, "prompt": "hello hello hello hello", "max_tokens": 200, **fields}


async def ask(url: str, model: str, on_event: Callable[[], None] = lambda: None) -> list[Any]:
    async with httpx.AsyncClient(timeout=None) as client:
        return await answer(client, url, body(model), on_event)


def texts(found: list[Any]) -> list[str]:
    return [event["text"] for event in found]


def killer(server: Served) -> Callable[[], None]:
    """Return what kills the oldest worker, that is the one that serves, at some of a stream's events."""
    events, killed = count(1), set[int]()

    def on_event() -> None:
        if next(events) in KILL_AT:
            oldest = until(lambda: [each for each in server.processes("mlsys-worker") if each.pid not in killed])[0]
            killed.add(oldest.pid)
            oldest.kill()

    return on_event


def test_requests_under_adapters_survive_their_workers(arguments: list[str], tmp_path: Path) -> None:
    with served(*arguments) as server:
        expected = {name: asyncio.run(ask(server.url, name)) for name in NAMES}
        assert len({str(texts(found)) for found in expected.values()}) == 3
        # What follows must not depend on what is on the disk.
        for file in (tmp_path / "later").iterdir():
            file.unlink()

        async def killed(model: str) -> list[Any]:
            return await ask(server.url, model, killer(server))

        for name in NAMES:  # alone in its batches, as before: the same to the last bit
            assert asyncio.run(killed(name)) == expected[name]

        async def all_together() -> list[list[Any]]:
            kill = killer(server)  # counts the events of all
            return await asyncio.gather(*(ask(server.url, name, kill) for name in NAMES * 2))

        # In torch's operators the last digits depend on who else is in the batch; the text does not here.
        for name, found in zip(NAMES * 2, asyncio.run(all_together()), strict=True):
            assert texts(found) == texts(expected[name])
        until(lambda: Server(server.process, httpx.URL(server.url).port or 0).metric("worker_deaths_total") > 3)
