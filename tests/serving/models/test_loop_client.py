from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import LoopClosedError, ServeRequest, ServingLoop, ThreadExecutor, WallClock
from mlsys_core.loop.baselines import ZeroBatch
from mlsys_serving.models import DeadlineExceededError, LoopClient

from tests.processes import FAULT_S, eventually


class Gate:
    """Runs batches once it is open; a payload that is an exception is its request's result."""

    def __init__(self) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()

    def __call__(self, batch: Any) -> Sequence[Any]:
        self.is_reached.set()
        self.is_open.wait()
        return [request.payload for request in batch.requests]


def make(gate: Gate) -> tuple[ServingLoop[Any, Any, Any], LoopClient[Any, Any, Any]]:
    client: LoopClient[Any, Any, Any] = LoopClient()
    return ServingLoop(ZeroBatch(max_batch_size=4), ThreadExecutor(gate), WallClock(), listener=client), client


def submit(
    client: LoopClient[Any, Any, Any], loop: ServingLoop[Any, Any, Any], key: str, payload: Any, **fields: Any
) -> asyncio.Task[Any]:
    return asyncio.create_task(client.submit(loop, ServeRequest(key, payload, **fields), key))


async def test_each_request_gets_its_own_result() -> None:
    gate = Gate()
    gate.is_open.set()
    loop, client = make(gate)
    with loop.start():
        tasks = [submit(client, loop, str(number), number) for number in range(100)]
        assert await asyncio.gather(*tasks) == list(range(100))


async def test_failures_expiry_and_a_stopped_loop() -> None:
    gate = Gate()
    loop, client = make(gate)
    with loop.start():
        failing = submit(client, loop, "a", InvalidInputError("bad row"))
        await eventually(gate.is_reached.is_set)
        late = submit(client, loop, "b", 1, deadline_s=WallClock().now() + 0.01)
        twin = submit(client, loop, "a", 2)
        with pytest.raises(InvalidInputError, match="in use"):
            await twin
        await asyncio.sleep(0.02)
        gate.is_open.set()
        with pytest.raises(InvalidInputError, match="bad row"):
            await failing
        with pytest.raises(DeadlineExceededError):
            await late
    with pytest.raises(LoopClosedError):
        await submit(client, loop, "c", 3)


async def test_cancelling_the_coroutine_cancels_the_request() -> None:
    gate = Gate()
    loop, client = make(gate)
    with loop.start():
        running = submit(client, loop, "a", 1)
        await eventually(gate.is_reached.is_set)
        waiting = submit(client, loop, "b", 2)
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.is_open.set()
        assert await running == 1
        assert loop.drain(FAULT_S)


async def test_a_loop_that_stops_ends_its_waiters() -> None:
    gate = Gate()
    loop, client = make(gate)
    loop.start()
    running = submit(client, loop, "a", 1)
    await eventually(gate.is_reached.is_set)
    waiting = submit(client, loop, "b", 2)
    await asyncio.sleep(0.01)
    stopping = asyncio.create_task(asyncio.to_thread(loop.stop))
    with pytest.raises(ServingError, match="left the serving loop as cancelled"):
        await waiting
    gate.is_open.set()
    await stopping
    await asyncio.gather(running, return_exceptions=True)
