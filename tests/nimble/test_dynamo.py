"""``torch.compile(model, backend="nimble")``."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mlsys_nimble.calls import PreparedCalls
from mlsys_nimble.dynamo import nimble
from torch import nn


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the calls that are prepared."""
    made: list[Any] = []
    prepare = PreparedCalls._prepare

    def record(self: PreparedCalls, *args: Any) -> Any:
        made.append(prepare(self, *args))
        return made[-1]

    monkeypatch.setattr(PreparedCalls, "_prepare", record)
    return made


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend=nimble, options={"executor": "reference", **options})


def test_the_entry_point_names_the_backend():
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="nimble")
    if not points:
        pytest.skip("the package was installed before it had this entry point: make setup")
    (point,) = points
    assert point.load() is nimble
    assert "nimble" in torch._dynamo.list_backends()


def test_weights_are_constants_of_the_schedule(schedules: list[Any]):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).eval()
    run, x = compiled(model), torch.randn(1, 3, 6, 6)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x))
    assert [len(prepared.program.operators) for prepared in schedules] == [1]


def test_changed_and_replaced_weights_are_noticed(schedules: list[Any]):
    model = nn.Linear(4, 4)
    run, x = compiled(model), torch.randn(2, 4)
    with torch.no_grad():
        run(x)
        model.weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))
        model.weight = nn.Parameter(torch.randn(4, 4))
        torch.testing.assert_close(run(x), model(x))
        torch.testing.assert_close(run(x), model(x))
    assert len(schedules) == 3


def test_buffers_are_written(schedules: list[Any]):
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    model = Counter()
    run = compiled(model)
    with torch.no_grad():
        assert [run(torch.ones(1)).item() for _ in range(4)] == [1, 2, 3, 4]
    assert model.calls == 4
    assert len(schedules) == 1


def test_shapes_are_static(schedules: list[Any]):
    model = nn.Linear(4, 4)
    run = compiled(model)
    with torch.no_grad():
        for batch in (2, 3, 5, 3, 2):
            x = torch.randn(batch, 4)
            torch.testing.assert_close(run(x), model(x))
            assert run(x).shape == (batch, 4)
    assert {prepared.program.values[prepared.program.inputs[0]].shape for prepared in schedules} == {
        (2, 4),
        (3, 4),
        (5, 4),
    }


def test_graph_breaks_work(schedules: list[Any]):
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x.exp() + 1
        if y.sum().item() > 10:
            return y.relu() * 2
        return y.tanh() * 3

    run = compiled(model)
    with torch.no_grad():
        for x in (torch.ones(2), torch.ones(20), torch.zeros(2)):
            torch.testing.assert_close(run(x), model(x))
    assert len(schedules) >= 3


def test_wanted_gradients_are_given():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    call = compiled(model)
    for _ in range(2):
        x = torch.randn(2, 3)
        wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        model.zero_grad()
        call(x).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient)


def test_a_graph_that_cannot_be_taken_runs_eagerly(caplog: pytest.LogCaptureFixture):
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.to_sparse().to_dense() + 1

    with torch.no_grad(), caplog.at_level(logging.WARNING, "mlsys_nimble"):
        torch.testing.assert_close(compiled(model)(torch.eye(2)), torch.eye(2) + 1)
