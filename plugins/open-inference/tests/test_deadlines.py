"""Which of several deadlines holds: always the earliest."""

from __future__ import annotations

import asyncio
from types import ModuleType

import numpy as np
import pytest
from mlsys_core.loop.clock import VirtualClock
from mlsys_open_inference.binding import WireRequest, WireTensor, bind
from mlsys_open_inference.engine import Engine
from mlsys_open_inference.grpc.server import timeout_of
from mlsys_serving.http import HttpConfig
from mlsys_serving.models.errors import DeadlineExceededError
from mlsys_serving.models.repository import ModelRepository
from mlsys_serving.models.version import Version

NEVER_S = 1e6  # a time that does not pass in a test


@pytest.mark.parametrize(
    ("asked", "default", "cap", "expected"),
    [
        (None, None, None, None),
        (None, 5, None, 5),
        (None, 5, 60, 5),
        (2.5, None, None, 2.5),
        (2.5, 5, None, 2.5),
        (10, 5, None, 5),
        (10, 5, 60, 10),
        (1e3, 5, 60, 60),
        (1e3, None, 60, 60),
        (-1.0, 5, 60, -1.0),  # it has passed on the way here
    ],
)
def test_the_clients_deadline_over_grpc_the_default_and_the_cap(
    asked: float | None, default: float | None, cap: float | None, expected: float | None
) -> None:
    assert timeout_of(asked, HttpConfig(request_timeout_s=default, max_request_timeout_s=cap)) == expected


def wire(**parameters: int) -> WireRequest:
    return WireRequest(inputs=[], parameters=dict(parameters))


@pytest.mark.parametrize(
    ("timeout_us", "front_s", "expected"),
    [
        (None, None, None),
        (None, 107.0, 107.0),
        (0, 107.0, 107.0),  # 0 is none
        (2_000_000, None, 102.0),
        (2_000_000, 107.0, 102.0),
        (9_000_000, 107.0, 107.0),
    ],
)
def test_the_timeout_parameter_and_the_fronts_deadline(
    timeout_us: int | None, front_s: float | None, expected: float | None, reference: ModuleType
) -> None:
    asked = wire() if timeout_us is None else wire(timeout=timeout_us)
    assert bind(asked, Version(reference.Echo()), now=100.0, deadline_s=front_s).deadline_s == expected


async def test_a_deadline_that_has_passed_ends_the_request_at_once(reference: ModuleType) -> None:
    model = reference.Add()
    model.is_held = True
    engine = Engine(ModelRepository([model]), VirtualClock())
    version = engine.repository.find("add")
    with pytest.raises(DeadlineExceededError):
        await engine.infer(version, add(), started_s=0.0, deadline_s=-NEVER_S)
    with pytest.raises(DeadlineExceededError):
        await anext(engine.stream(version, add(), started_s=0.0, deadline_s=-NEVER_S))
    assert model.num_cancelled == len(model.requests) == 2


async def test_a_stream_ends_at_its_deadline_too(reference: ModuleType) -> None:
    model = reference.Repeat()
    engine = Engine(ModelRepository([model]), VirtualClock())
    text = np.array([b"a b"], np.object_)
    tensor = WireTensor(name="text", datatype="BYTES", shape=(1,), read=lambda *_: text)
    asked = WireRequest(inputs=[tensor], parameters={"delay_s": NEVER_S})
    version = engine.repository.find("repeat")
    with pytest.raises(DeadlineExceededError):
        await anext(engine.stream(version, asked, started_s=0.0, deadline_s=-NEVER_S))
    assert model.num_cancelled == 1


async def test_a_deadline_to_come_does_not_end_the_request(reference: ModuleType) -> None:
    model = reference.Add()
    engine = Engine(ModelRepository([model]), VirtualClock())
    version = engine.repository.find("add")
    answer = await asyncio.wait_for(engine.infer(version, add(), started_s=0.0, deadline_s=1e9), 60)
    assert answer.outputs
    assert model.num_cancelled == 0


def add() -> WireRequest:
    """Return a request to the model that adds."""
    values = np.ones((1, 1), np.float32)
    return WireRequest(inputs=[WireTensor(name="a", datatype="FP32", shape=(1, 1), read=lambda *_: values)])
