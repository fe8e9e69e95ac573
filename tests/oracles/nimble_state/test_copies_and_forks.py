"""Copies, pickles, files and forked processes of a prepared model."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from torch import Tensor, nn


def through_pickle(prepared: Nimble) -> Any:
    return pickle.loads(pickle.dumps(prepared))


def through_file(prepared: Nimble) -> Any:
    file = io.BytesIO()
    torch.save(prepared, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Nimble], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_file,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "native": {"executor": "native", "num_threads": 2},
    "training": {"training": True, "num_threads": 2},
    "eager": {"fallback": "eager", "executor": "reference"},
}


class Net(nn.Module):
    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu().flatten(1)
        if self.branches and x.sum().item() < 0:
            x = -x
        y: Tensor = self.linear(x)
        return y


def prepared_net(options: dict[str, Any]) -> Nimble:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return Nimble(Net(branches="fallback" in options)).prepare(torch.randn(2, 3, 8, 8), **options)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_copy_is_a_model_of_its_own(how: str, options: str):
    prepared = prepared_net(OPTIONS[options])
    x = torch.randn(2, 3, 8, 8)
    before = prepared(x).detach()
    other = COPIES[how](prepared)
    torch.testing.assert_close(other(x).detach(), before)
    if how != "copy":
        other.model.linear.weight.data.mul_(3)
        torch.testing.assert_close(prepared(x).detach(), before)
        torch.testing.assert_close(other(x).detach(), other.model(x).detach())
    if "training" in OPTIONS[options]:
        other(x).sum().backward()
        assert other.model.linear.weight.grad is not None


def test_state_dicts_go_from_a_prepared_model_to_another():
    one, other = prepared_net(OPTIONS["native"]), Nimble(Net(branches=False))
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(other.prepare(x)(x), one(x))


def test_state_dicts_have_each_weight_once():
    prepared = prepared_net(OPTIONS["eager"])
    assert set(prepared.state_dict()) == {f"model.{name}" for name in prepared.model.state_dict()}


def test_an_unprepared_model_stays_unprepared():
    from mlsys_core.errors import InvalidInputError

    with pytest.raises(InvalidInputError, match="call prepare"):
        copy.deepcopy(Nimble(Net(branches=False)))(torch.zeros(2, 3, 8, 8))


def answer(prepared: Nimble, x: Tensor, results: Any) -> None:
    result = prepared(x)
    if result.requires_grad:
        result.sum().backward()
    results.put(result.detach().tolist())


@pytest.mark.parametrize("options", OPTIONS)
def test_a_forked_process_answers(options: str):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # so that torch has threads, too, which the child has not
    try:
        prepared, x = prepared_net(OPTIONS[options]), torch.randn(2, 3, 8, 8)
        expected = prepared(x).detach()
        torch.randn(512, 512) @ torch.randn(512, 512)
        fork = multiprocessing.get_context("fork")
        results = fork.SimpleQueue()
        child = fork.Process(target=answer, args=(prepared, x, results), daemon=True)
        child.start()
        child.join(240)
        assert child.exitcode == 0, "the child hangs, or has failed"
        torch.testing.assert_close(torch.tensor(results.get()), expected)
        torch.testing.assert_close(prepared(x).detach(), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("max_concurrency", [1, 2])
def test_a_fork_during_another_threads_call(max_concurrency: int):
    """The child must not wait for a lock, or an executor, that a thread has which it does not have."""
    prepared = prepared_net({"executor": "native", "num_threads": 2, "max_concurrency": max_concurrency})
    x = torch.randn(2, 3, 8, 8)
    expected = prepared(x)
    assert prepared.prepared is not None
    executor: Any = prepared.prepared.executor
    inside, leave = threading.Event(), threading.Event()
    run = executor.run

    def run_slowly(inputs: Any) -> Any:
        if threading.current_thread() is caller:
            inside.set()
            assert leave.wait(240)
        return run(inputs)

    executor.run = run_slowly
    caller = threading.Thread(target=prepared, args=(x,))
    caller.start()
    assert inside.wait(240)
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    child = fork.Process(target=answer, args=(prepared, x, results), daemon=True)
    child.start()
    child.join(240)
    leave.set()
    caller.join()
    assert child.exitcode == 0, "the child hangs, or has failed"
    torch.testing.assert_close(torch.tensor(results.get()), expected)
