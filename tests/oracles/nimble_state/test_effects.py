"""Writes that schemas do not declare, views made in place, and tensors that forward makes of numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mlsys_nimble import CaptureError, Nimble
from mlsys_nimble.dynamo import nimble
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.dlpack import from_dlpack, to_dlpack


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 3, 6, 6)),
    "batch norm, no affine": (lambda: nn.BatchNorm1d(3, affine=False, momentum=0.3), (4, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, track_running_stats=True, affine=True), (2, 3, 5, 5)),
    "functional batch norm": (
        lambda: Call(
            lambda self, x: functional.batch_norm(x, self.mean, self.var, training=True),
            mean=torch.zeros(3),
            var=torch.ones(3),
        ),
        (4, 3, 5),
    ),
    "functional instance norm": (
        lambda: Call(
            lambda self, x: functional.instance_norm(x, self.mean, self.var, use_input_stats=True),
            mean=torch.zeros(3),
            var=torch.ones(3),
        ),
        (4, 3, 5),
    ),
    "native batch norm": (
        lambda: Call(
            lambda self, x: torch.native_batch_norm(x, None, None, self.mean, self.var, True, 0.1, 1e-5),
            mean=torch.zeros(3),
            var=torch.ones(3),
        ),
        (4, 3, 5),
    ),
    "normalised by a norm in train mode twice": (
        lambda: Call(lambda self, x: self.norm(self.norm(x) + x), norm=nn.BatchNorm1d(3)),
        (4, 3),
    ),
}


@pytest.mark.parametrize("executor", ["reference", "native"])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_updated(name: str, executor: str):
    make, shape = NORMS[name]
    model = make().train()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=nimble, options={"executor": executor})
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(shape) + 1
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)
    if "functional" in name:  # these update in eval mode, too
        prepared = Nimble(model).prepare(torch.randn(shape), executor=executor)
        torch.testing.assert_close(prepared(x), eager(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)


def test_an_operator_that_does_not_say_what_it_writes_is_refused():
    with torch.library._scoped_library("mlsys_test", "FRAGMENT") as library:
        library.define("forgets(Tensor x, Tensor state) -> Tensor")

        def forgets(x: Tensor, state: Tensor) -> Tensor:
            state.add_(1)
            return x * 2

        library.impl("forgets", forgets, "CPU")
        model = Call(lambda self, x: torch.ops.mlsys_test.forgets(x, self.state), state=torch.zeros(2))
        with pytest.raises(CaptureError, match="writes to its arguments, which its schema does not say"):
            Nimble(model).prepare(torch.ones(2), executor="reference")
        assert model.state.tolist() == [0, 0]


def detached(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.detach_().add_(1)
    return y


def turned(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    first = y[0]
    y.transpose_(0, 1)
    y[0] = 3
    y.unsqueeze_(0).squeeze_(0).t_()
    return y + 0, first + 0


def tensor_of_numbers(self: Any, x: Tensor) -> Tensor:
    count = torch.tensor([0.0, 1.0])
    count += 1
    other = torch.Tensor([1, 2])
    other.mul_(2)
    return x * count + other + torch.tensor(3.0) + x.new_tensor([1, 2])


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "detach_": (detached, (3, 2)),
    "transpose_ and its like": (turned, (3, 2)),
    "torch.tensor": (tensor_of_numbers, (3, 2)),
    "stft": (lambda self, x: torch.stft(x, 16, window=self.window, return_complex=True).abs(), (2, 64)),
    "istft": (
        lambda self, x: torch.istft(torch.stft(x, 16, window=self.window, return_complex=True), 16, window=self.window),
        (2, 64),
    ),
    ".data": (lambda self, x: (x * 2).data.add_(1), (3,)),
}


@pytest.mark.parametrize("executor", ["reference", "native"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_these_are_replayed(name: str, executor: str):
    function, shape = FUNCTIONS[name]
    model = Call(function, window=torch.hann_window(16))
    prepared = Nimble(model).prepare(torch.randn(shape), executor=executor)
    for _ in range(3):
        x = torch.randn(shape)
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-5)


def test_memory_reached_by_dlpack_is_refused():
    model = Call(lambda self, x: from_dlpack(to_dlpack(x * 2)) + 1)
    with pytest.raises(CaptureError, match="DLPack"):
        Nimble(model).prepare(torch.ones(2), executor="reference")


def test_the_shape_of_an_argument_is_not_changed_in_place():
    with pytest.raises(CaptureError, match="changes the shape of an argument"):
        Nimble(Call(lambda self, x: x.t_())).prepare(torch.ones(2, 3), executor="reference")


@pytest.mark.parametrize("executor", ["reference", "native"])
def test_statistics_whose_elements_share_memory_are_refused(executor: str):
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.batch_norm(x, mean.expand(4), var.expand(4), training=True)

    with pytest.raises(CaptureError, match="running statistics whose elements share memory"):
        Nimble(Net()).prepare((torch.randn(3, 4), torch.zeros(1), torch.ones(1)), executor=executor)
