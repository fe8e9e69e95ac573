"""Captured programs, run by the reference, are the models they were captured from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.capture import Captured, capture
from mlsys_nimble.errors import CaptureError
from mlsys_nimble.ir.operators import Aten
from mlsys_nimble.ir.program import check_program
from torch import nn
from torch.utils._pytree import tree_leaves


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def captured_as_eager(model: Any, *args: Any, **kwargs: Any) -> Captured:
    """Capture, and compare two replays with a copy of the model, its results and what it does to buffers and inputs."""
    eager = copy.deepcopy(model)
    captured = capture(model, args, kwargs)
    check_program(captured.program)
    executor = ReferenceExecutor(captured.program)
    for _ in range(2):
        ours, theirs = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
        with torch.no_grad():
            expected = eager(*theirs[0], **theirs[1])
        torch.testing.assert_close(executor.run(tensors_of(ours)), tensors_of(expected), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tensors_of(ours), tensors_of(theirs), rtol=0, atol=0)
        if isinstance(model, nn.Module):
            torch.testing.assert_close(model.state_dict(), eager.state_dict())
    return captured


def kinds_of(captured: Captured) -> list[str]:
    return [type(operator.kind).__name__ for operator in captured.program.operators]


class Counter(nn.Module):
    """Writes to a buffer in place, assigns another, writes to a view of a result and to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.calls.add_(1)
        y = self.conv(x).relu_()
        self.mean = self.mean * 0.5 + y.mean((0, 2, 3))
        first = y[:, ::2]
        first.mul_(2)
        y[0, 1] = 3.0
        x[0] = 0
        return {"y": y, "view": (first, self.calls), "x": x, "number": 3, "mean": self.mean}


def test_writes_in_place_are_written_by_a_replay():
    captured = captured_as_eager(Counter(), torch.randn(2, 3, 8, 8))
    assert len(captured.program.mutations) == 3


def test_capture_leaves_the_model_and_the_inputs_as_they_were():
    model, x = Counter(), torch.randn(2, 3, 8, 8)
    before, x_before = copy.deepcopy(model.state_dict()), x.clone()
    mean = model.mean
    capture(model, (x,))
    assert model.mean is mean
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(x, x_before, rtol=0, atol=0)


def test_operators_say_where_they_come_from():
    operators = capture(Counter(), (torch.randn(1, 3, 8, 8),)).program.operators
    convolution = next(operator for operator in operators if operator.name == "conv.convolution")
    assert convolution.source.startswith("test_capture.py:")
    assert convolution.source.endswith("in forward: y = self.conv(x).relu_()")


def test_operators_without_a_kind_are_run_by_torch():
    captured = captured_as_eager(lambda x: torch.topk(x.cumsum(0), 2), torch.randn(5))
    assert [o.kind.target for o in captured.program.operators if isinstance(o.kind, Aten)] == [
        "aten.cumsum.default",
        "aten.topk.default",
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        pytest.param(lambda x: x if x.sum() > 0 else -x, "asks for the value of a tensor", id="branch"),
        pytest.param(lambda x: x * x.tolist()[0], "Tensor.tolist", id="tolist"),
        pytest.param(lambda x: torch.from_numpy(x.numpy()) + 1, "Tensor.numpy", id="numpy"),
        pytest.param(lambda x: x.nonzero(), "shape of its result depends on values", id="nonzero"),
        pytest.param(lambda x: x[x > 0], "shape of its result depends on values", id="mask"),
        pytest.param(lambda x: x.t_(), "changes its arguments in place", id="metadata"),
        pytest.param(lambda x: x.as_strided((2,), (1,)).add_(1) + x[0], "a write in place through", id="as_strided"),
        pytest.param(lambda x: x.to_sparse(), "dense tensors", id="sparse"),
    ],
)
def test_operators_that_cannot_be_scheduled_are_refused_with_their_line(function: Any, message: str):
    with pytest.raises(CaptureError, match=message) as caught:
        capture(function, (torch.ones(3, 3),))
    assert "test_capture.py:" in str(caught.value)


class Leaves(nn.Module):
    def __init__(self, forward: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: (x + 1).to("meta"), "moves a tensor computed from inputs to meta"),
        (lambda x: (x, torch.ones(3, device="meta")), "returns a tensor on meta"),
        (lambda x: (torch.rand(3, device="meta"), x)[1] + 1, "draws random numbers on meta"),
        (lambda x: x + (x * 2).data_ptr(), "asks where a tensor computed from inputs lies"),
    ],
)
def test_what_leaves_the_device_or_torch_is_refused(forward: Callable[[torch.Tensor], Any], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(Leaves(forward), (torch.ones(3),))


def test_a_custom_operator_may_look_at_addresses() -> None:
    @torch.library.custom_op("mlsys_test::address", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        assert x.data_ptr()
        return torch.from_numpy(2 * x.numpy())

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    captured = capture(Leaves(lambda x: twice(x) + 1), (torch.ones(3),))
    assert any("mlsys_test" in str(operator.kind) for operator in captured.program.operators)
