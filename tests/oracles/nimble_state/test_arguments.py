"""Arguments that share memory, change behind a schedule's back, or hold tensors; and results that share memory."""

from __future__ import annotations

import copy
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_nimble import CaptureError, Nimble
from mlsys_nimble.dynamo import nimble
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack

EXECUTORS = ("native", "reference")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.zeros(3))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def prepared(function: Callable[..., Any], *args: Any, executor: str = "reference", **options: Any) -> Nimble:
    return Nimble(Call(function)).prepare(args, executor=executor, **options)


# Memory that arguments share


def write_first(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return y * 2


def count(self: Any, x: Tensor) -> Tensor:
    self.state += 1
    return x * 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_writes_to_shared_memory_are_refused_or_run_eagerly(executor: str):
    model = prepared(write_first, torch.zeros(3), torch.zeros(3), executor=executor)
    memory = torch.zeros(4)
    for x, y in ((memory[:3], memory[1:]), (memory[:3], memory[:3]), (model.model.state, model.model.state)):
        with pytest.raises(CaptureError, match="share memory"):
            model(x, y)
    assert memory.tolist() == [0, 0, 0, 0]
    assert model(memory[:2].clone(), memory[2:].clone()).tolist() == [0, 0]  # side by side is not shared
    eager = prepared(write_first, torch.zeros(3), torch.zeros(3), executor=executor, fallback="eager")
    assert eager(memory[:3], memory[1:]).tolist() == [2, 2, 0]
    with pytest.raises(CaptureError, match="share memory"):
        prepared(write_first, memory[:3], memory[1:], executor=executor)


def test_a_buffer_that_is_written_is_no_argument():
    model = prepared(count, torch.zeros(3))
    with pytest.raises(CaptureError, match="share memory"):
        model(model.model.state)
    compiled_model = Call(count)
    compiled = torch.compile(compiled_model, backend=nimble, options={"executor": "reference"})
    compiled(torch.zeros(3))
    assert compiled(compiled_model.state).tolist() == [4, 4, 4]


def test_arguments_may_share_memory_that_is_only_read():
    model, memory = prepared(lambda self, x, y: x * 2 + y, torch.zeros(3), torch.zeros(3)), torch.arange(4.0)
    torch.testing.assert_close(model(memory[:3], memory[1:]), memory[:3] * 2 + memory[1:])


def views(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    return x.view(-1), x[0], x.t(), x, y, y.view(-1), y[0], y.t(), y, y[:, 1:2], self.state[1:], x.expand(2, 2, 2)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("compiles", [False, True])
def test_results_share_memory_as_in_eager(executor: str, compiles: bool):
    model = prepared(views, torch.zeros(2, 2), executor=executor)
    eager = copy.deepcopy(model.model)
    run = torch.compile(model.model, backend=nimble, options={"executor": executor}) if compiles else model
    same_memory(run, eager, model.model, torch.randn(2, 2))
    turned = prepared(contiguous_views, torch.zeros(2, 2), executor=executor)
    for x in (torch.randn(2, 2).t(), torch.randn(2, 2)):  # a copy, then a view: two schedules
        same_memory(turned, copy.deepcopy(turned.model), turned.model, x)


def contiguous_views(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = x.contiguous()
    y[0] = 1
    return views(self, y)


def same_memory(ours: Any, theirs: Any, net: Any, x: Tensor) -> None:
    """Write to each result and to the argument in turn: what else changes is the same."""
    other = torch.empty_strided(x.shape, x.stride()).copy_(x)
    got, expected = ours(x), theirs(other)
    torch.testing.assert_close(got, expected)
    for place in range(len(got)):
        for results, given in ((got, x), (expected, other)):
            given.add_(1)
            if results[place].dim() < 3:  # torch writes to nothing that is expanded
                results[place][..., 0] += 1
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(x, other)
        torch.testing.assert_close(net.state, theirs.state)


# Arguments that are not tensors


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    shift: Any = 0


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale, self.inner = scale, {"shift": [0, 1]}


def scaled(self: Any, x: Tensor, config: Any) -> Tensor:
    return x * config.scale


ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[[], Any], Callable[[Any], Any]]] = {
    "a dataclass": (scaled, Config, lambda c: setattr(c, "scale", 3.0)),
    "a namespace": (scaled, lambda: SimpleNamespace(scale=1.0), lambda c: setattr(c, "scale", 3.0)),
    "an object": (scaled, lambda: Settings(1.0), lambda c: setattr(c, "scale", 3.0)),
    "an object in a list": (
        lambda self, x, c: x + c[0].inner["shift"][1],
        lambda: [Settings(1.0)],
        lambda c: c[0].inner["shift"].append(c[0].inner["shift"].pop() + 5),
    ),
    "a NumPy array": (lambda self, x, c: x * float(c[1]), lambda: np.ones(3), lambda c: c.fill(3)),
    "a NumPy array, as a tensor": (
        lambda self, x, c: x * torch.from_numpy(c),
        lambda: np.ones(3, dtype=np.float32),
        lambda c: c.fill(3),
    ),
    "a dictionary": (lambda self, x, c: x * c["scale"], lambda: {"scale": 1.0}, lambda c: c.update(scale=3.0)),
    "a set": (lambda self, x, c: x * len(c), lambda: {1}, lambda c: c.add(2)),
    "the sign of zero": (
        lambda self, x, c: 1 / (torch.zeros_like(x) * c[0]),
        lambda: [0.0],
        lambda c: c.__setitem__(0, -0.0),
    ),
    "an object with a tensor": (
        lambda self, x, c: x * c.shift + c.scale,
        lambda: Config(shift=torch.ones(3)),
        lambda c: c.shift.fill_(3),
    ),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_known_by_what_they_hold(name: str, executor: str):
    function, make, change = ARGUMENTS[name]
    argument, x = make(), torch.randn(3).abs() + 1
    model = prepared(function, x, argument, executor=executor)
    before = model(x, argument)
    torch.testing.assert_close(before, model.model(x, argument))
    assert len(model._calls) == 1  # type: ignore[arg-type]
    change(argument)
    expected = model.model(x, argument)
    assert not torch.equal(before, expected)
    torch.testing.assert_close(model(x, argument), expected)
    torch.testing.assert_close(model(x, make()), before)


@pytest.mark.parametrize("argument", [iter([1]), object(), memoryview(b"1"), np.array([object()]), {1: object()}])
def test_unknowable_values_are_refused(argument: Any):
    with pytest.raises(CaptureError, match="nothing tells when it changes"):
        prepared(lambda self, x, c: x * 2, torch.ones(2), argument)


def test_a_list_that_forward_changes_is_refused():
    def keep(self: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x * 2)
        return x

    with pytest.raises(CaptureError, match="changes a list or dictionary"):
        prepared(keep, torch.ones(2), [])


class Cache:
    """Keys of all calls so far, as decoders keep them."""

    def __init__(self) -> None:
        self.layers: list[Config] = []
        self.seen = 0


def decode(self: Any, x: Tensor, cache: Cache) -> tuple[Tensor, Cache, Config]:
    if not cache.layers:
        cache.layers.append(Config(shift=x))
    else:
        cache.layers[0].shift = torch.cat([cache.layers[0].shift, x], 1)
    cache.seen = cache.layers[0].shift.shape[1]
    return cache.layers[0].shift.sum(1), cache, Config(shift=x * 2)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_objects_are_changed_as_forward_changes_them(executor: str):
    model = prepared(decode, torch.zeros(2, 3), Cache(), executor=executor)
    ours, theirs = Cache(), Cache()
    for _ in range(4):
        x = torch.randn(2, 3)
        (got, cache, made), (expected, _, wanted) = model(x, ours), model.model(x, theirs)
        torch.testing.assert_close(got, expected)
        assert cache is ours
        assert (ours.seen, len(ours.layers)) == (theirs.seen, 1)
        torch.testing.assert_close(ours.layers[0].shift, theirs.layers[0].shift)
        torch.testing.assert_close(made.shift, wanted.shift)


# What does not come from torch


REFUSED: dict[str, Callable[..., Any]] = {
    "NumPy": lambda self, x: x * float(np.random.rand()),
    "NumPy, an own generator": lambda self, x: x * float(np.random.default_rng().random()),
    "NumPy, as a tensor": lambda self, x: x + torch.from_numpy(np.random.default_rng().random(3)),
    "NumPy, by as_tensor": lambda self, x: x + torch.as_tensor(np.random.default_rng().random(3)),
    "Python": lambda self, x: x * random.random(),
    "Python, rarely": lambda self, x: x * 2 if random.random() < 1e-9 else x,
    "Python, an own generator": lambda self, x: x * random.Random().random(),
    "the clock": lambda self, x: x * time.perf_counter(),
    "DLPack": lambda self, x: x + torch.from_dlpack(to_dlpack(x * 2)),
    "NumPy by DLPack": lambda self, x: x + torch.as_tensor(np.from_dlpack(to_dlpack_object(x * 2)).copy()),
    "an address": lambda self, x: x + values_at(x * 2),
}


class to_dlpack_object:  # noqa: N801 - stands for a library's own tensor
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        return to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def values_at(x: Tensor) -> Tensor:
    import ctypes

    return torch.tensor(list((ctypes.c_float * x.numel()).from_address(x.data_ptr())))


@pytest.mark.parametrize("name", REFUSED)
def test_values_from_elsewhere_are_refused(name: str):
    with pytest.raises(CaptureError, match=r"random numbers|not do the same each time|DLPack|asks where a tensor"):
        prepared(REFUSED[name], torch.ones(3))


@pytest.mark.parametrize("name", ["NumPy", "Python", "the clock", "NumPy, an own generator"])
def test_values_from_elsewhere_are_refused_in_training(name: str):
    with torch.enable_grad(), pytest.raises(CaptureError, match=r"random numbers|not do the same each time"):
        Nimble(Call(REFUSED[name])).prepare(torch.ones(3, requires_grad=True), training=True, executor="reference")


def test_a_counter_that_changes_the_result_is_refused():
    def counted(self: Any, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x * self.calls

    with pytest.raises(CaptureError, match="not do the same each time"):
        prepared(counted, torch.ones(2))


def test_a_table_that_is_kept_from_the_first_call_is_not():
    tables: dict[int, Tensor] = {}

    def with_table(self: Any, x: Tensor) -> Tensor:
        if x.shape[0] not in tables:
            tables[x.shape[0]] = torch.arange(x.shape[0]).float().sin()
        return x + tables[x.shape[0]]

    model, x = prepared(with_table, torch.zeros(3)), torch.randn(3)
    torch.testing.assert_close(model(x), x + torch.arange(3).sin())


def test_the_models_own_errors_are_its_own():
    def wrong(self: Any, x: Tensor) -> Tensor:
        raise ValueError("my own")

    for training in (False, True):
        with pytest.raises(ValueError, match="my own"):
            Nimble(Call(wrong)).prepare(torch.ones(2), training=training, executor="reference")
