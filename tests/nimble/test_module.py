"""The facade: what users call."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections import namedtuple
from types import FunctionType
from typing import Any

import mlsys_nimble
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import CaptureError, InternalError, Nimble
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dropout = nn.Dropout(0.9)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.dropout(self.linear(x)).relu() * scale


def prepared(model: nn.Module, *args: Any, **options: Any) -> Nimble:
    return Nimble(model).prepare(args, executor="reference", **options)


def test_prepare_schedules_inference_and_leaves_the_mode_alone():
    model = Net().train()
    nimble = prepared(model, torch.zeros(2, 4))
    assert model.dropout.training
    x = torch.randn(2, 4)
    torch.testing.assert_close(nimble(x), copy.deepcopy(model).eval()(x).detach())
    assert not nimble(x).requires_grad


def test_arguments_and_results_keep_their_structure():
    pair = namedtuple("pair", "first second")

    class Model(nn.Module):
        def forward(self, items: dict[str, Any], *rest: Any, flag: bool = False) -> dict[str, Any]:
            x, (y, z) = items["x"], items["yz"]
            return {"sum": x + y, "pair": pair(z * 2, [x, None, "text"]), "rest": rest, "flag": flag, "again": x}

    args = ({"x": torch.randn(3), "yz": [torch.randn(3), torch.randn(2)]}, 5)
    nimble = Nimble(Model()).prepare(args, example_kwargs={"flag": True}, executor="reference")
    result = nimble(*args, flag=True)
    expected = Model()(*args, flag=True)
    assert result["again"] is args[0]["x"]
    assert result["pair"].second[0] is args[0]["x"]
    assert type(result["pair"]) is pair
    assert result.keys() == expected.keys()
    torch.testing.assert_close(result["sum"], expected["sum"])
    torch.testing.assert_close(result["pair"].first, expected["pair"].first)
    assert (result["rest"], result["flag"], result["pair"].second[1:]) == ((5,), True, [None, "text"])


def test_other_shapes_and_arguments_get_schedules_of_their_own_up_to_a_bound(caplog: pytest.LogCaptureFixture):
    model = Net().eval()
    nimble = prepared(model, torch.zeros(1, 4), max_schedules=2)
    with caplog.at_level(logging.INFO, "mlsys_nimble"), torch.no_grad():
        for x in (torch.randn(2, 4), torch.randn(3, 4), torch.randn(2, 4)):
            torch.testing.assert_close(nimble(x), model(x))
        torch.testing.assert_close(nimble(x, scale=2.0), model(x, scale=2.0))
    assert nimble._calls is not None
    assert len(nimble._calls) == 2
    messages = [record.message for record in caplog.records]
    assert len(messages) == 3  # batches of 2 and 3, and the other scale; the second batch of 2 was there
    assert messages[0].startswith("prepared float32[2, 4]: ")
    assert messages[1].endswith("2 of at most 2 schedules kept, the one unused for longest was dropped")


def test_a_second_caller_gets_an_executor_on_the_cores_that_are_left():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    nimble = Nimble(nn.Tanh()).prepare(torch.zeros(2), executor="native", num_threads=cores, max_concurrency=2)
    own, x = nimble.prepared, torch.randn(2)
    assert own is not None
    assert own._others is not None
    for _ in range(3):
        nimble(x)
    assert own._others.get() is None  # a single caller needs no other
    own._others.put(None)
    with own._turn:  # as if another caller were in it
        torch.testing.assert_close(nimble(x), x.tanh())
    other = own._others.get()
    assert isinstance(other, NativeExecutor)
    assert other.num_threads == 1


def test_threads_take_turns_or_run_side_by_side():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).eval()
    for max_concurrency in (1, 3):
        nimble = prepared(model, torch.zeros(2, 16), max_concurrency=max_concurrency)
        errors: list[BaseException] = []

        def work(seed: int, nimble: Nimble = nimble, errors: list[BaseException] = errors) -> None:
            generator = torch.Generator().manual_seed(seed)
            try:
                for _ in range(20):
                    x = torch.randn(2, 16, generator=generator)
                    torch.testing.assert_close(nimble(x), model(x).detach())
            except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


def test_counters_count_every_call_of_several_threads():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    model = Counter()
    nimble = prepared(model, torch.zeros(2), max_concurrency=4)
    threads = [threading.Thread(target=lambda: [nimble(torch.zeros(2)) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.calls == 100


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu()
        if y.sum() > 1e6:
            y = y - 1
        return y * 2


def test_an_unschedulable_model_is_refused_or_runs_eagerly(caplog: pytest.LogCaptureFixture):
    model, x = Branching(), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"test_module.py:\d+, in forward: if y.sum\(\) > 1e6:.*fallback='eager'"):
        prepared(model, x)
    nimble = prepared(model, x, fallback="eager")
    assert "parts of the model run eagerly" in caplog.text
    for _ in range(3):
        x = torch.randn(2, 4)
        torch.testing.assert_close(nimble(x), model(x).detach())
    torch.testing.assert_close(nimble(x + 1e7), model(x + 1e7).detach())


class NoticesTheRun(nn.Module):
    """A model that fails only while it is compiled or captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            raise LookupError("no plan for compilers")
        return x * 2


class Wrapped(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def fails(*_: Any, **__: Any) -> Any:
    raise IndexError("tuple index out of range")


@pytest.mark.parametrize(
    "place", ["mlsys_nimble.capture.tracer.find_rule", "mlsys_nimble.prepared.optimise"], ids=["capture", "passes"]
)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_fault_of_nimbles_own_is_no_refusal(place: str, training: bool, monkeypatch: pytest.MonkeyPatch):
    model, x = Net(), torch.randn(2, 4)
    monkeypatch.setattr(place.replace("prepared", "training.graphs") if training else place, fails)
    with pytest.raises(InternalError, match=r"fault of Nimble's own.* line \d+ \(IndexError: tuple") as caught:
        prepared(model, x, training=training)
    assert isinstance(caught.value.__cause__, IndexError)
    assert "Please report it" in str(caught.value)


def test_a_model_that_fails_only_in_a_captured_run_is_refused():
    with pytest.raises(CaptureError, match="not when it is watched \\(LookupError: no plan for compilers") as caught:
        prepared(NoticesTheRun(), torch.randn(2))
    assert not isinstance(caught.value, InternalError)


def test_code_of_no_module_that_fails_in_a_captured_run_is_refused(monkeypatch: pytest.MonkeyPatch):
    names = {**NoticesTheRun.forward.__globals__}
    del names["__name__"]  # as in what exec compiles
    monkeypatch.setattr(NoticesTheRun, "forward", FunctionType(NoticesTheRun.forward.__code__, names))
    with pytest.raises(CaptureError, match="not when it is watched"):
        prepared(NoticesTheRun(), torch.randn(2))


def test_an_operator_that_fails_only_in_a_captured_run_is_refused():
    @torch.library.custom_op("mlsys_test::picky", mutates_args=())
    def picky(x: torch.Tensor) -> torch.Tensor:
        if x.is_inference():
            raise LookupError("no inference tensors")
        return x * 2

    with pytest.raises(CaptureError, match=r"not when it is watched \(LookupError: no inference tensors") as caught:
        prepared(nn.Sequential(nn.ReLU(), Wrapped(picky)), torch.randn(2))
    assert not isinstance(caught.value, InternalError)


def test_misuse_is_explained():
    x = torch.zeros(2, 4)
    with pytest.raises(InvalidInputError, match="call prepare"):
        Nimble(Net())(x)
    with pytest.raises(InvalidInputError, match="no option 'streams'"):
        prepared(Net(), x, streams=3)
    with pytest.raises(InvalidInputError, match="max_schedules is 0"):
        prepared(Net(), x, max_schedules=0)
    with pytest.raises(InvalidInputError, match="no executor is called 'gpu'"):
        Nimble(Net()).prepare(x, executor="gpu")
    with pytest.raises(InvalidInputError, match="requires a gradient"):
        prepared(Net(), x)(x.clone().requires_grad_())
    with pytest.raises(CaptureError, match="cpu and meta"):
        prepared(Net().to("meta"), x)


def test_compile_is_the_compiler_registered_with_core():
    from mlsys_core.lazy import resolve
    from mlsys_nimble._plugin import mlsys_register_compilers

    (spec,) = mlsys_register_compilers()
    assert spec.name == "nimble"
    assert resolve(spec.factory) is mlsys_nimble.compile
    model, x = Net().eval(), torch.randn(2, 4)
    torch.testing.assert_close(mlsys_nimble.compile(model, x, executor="reference")(x), model(x).detach())


def test_autocast_has_a_schedule_of_its_own():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 4)), torch.randn(3, 8)
    nimble = prepared(model, x)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(nimble(x), model(x))
            with torch.autocast("cpu", torch.bfloat16):
                made, wanted = nimble(x), model(x)
        assert made.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(made, wanted, rtol=0.02, atol=0.02)


def test_it_shows_itself_in_notebooks():
    model = Nimble(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    assert "call prepare" in model._repr_html_()
    shown = model.prepare(torch.zeros(1, 4), executor="reference")._repr_html_()
    assert "<caption>Nimble(Sequential)</caption>" in shown
    assert "<td>float32 [1, 4]</td>" in shown
    assert "<td>ReferenceExecutor on cpu</td>" in shown
    assert "for training" in model.prepare(torch.zeros(1, 4), training=True, executor="reference")._repr_html_()
