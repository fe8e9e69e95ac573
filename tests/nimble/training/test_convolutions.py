"""Convolutions of training and their gradients beside torch's in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.ir.operators import Aten, Convolution, Input
from mlsys_nimble.ir.program import Operator
from mlsys_nimble.ir.strides import channels_last, dense
from mlsys_nimble.training import convolutions
from mlsys_nimble.training.convolutions import way_of, work_of
from mlsys_nimble.training.kernels import KernelList
from mlsys_nimble.training.passes import GRADIENT
from torch import Tensor

pytestmark = pytest.mark.usefixtures("kernel_level")

LANES = 16  # of the widest build; narrower ones take its multiples too
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {  # x, weight, and what differs from plain
    "tiles of 4": ((3, 2 * LANES, 8, 12), (3 * LANES, 2 * LANES, 3, 3), {"padding": (1, 1)}),
    "tiles cut off": ((2, LANES, 9, 11), (4 * LANES, LANES, 3, 3), {"padding": (1, 1)}),
    "no padding": ((5, 2 * LANES, 10, 9), (LANES, 2 * LANES, 3, 3), {}),
    "much padding": ((5, LANES, 6, 6), (LANES, LANES, 3, 3), {"padding": (2, 1)}),
    "tiles of 2": ((20, LANES, 2, 2), (2 * LANES, LANES, 3, 3), {"padding": (1, 1)}),
    "many blocks": ((8, 2 * LANES, 33, 33), (2 * LANES, 2 * LANES, 3, 3), {"padding": (1, 1)}),
    "depthwise": ((3, 5 * LANES, 4, 3), (5 * LANES, 1, 3, 3), {"padding": (1, 1), "groups": 5 * LANES}),
    "depthwise, strided": (
        (2, 2 * LANES, 7, 8), (2 * LANES, 1, 5, 5), {"padding": (2, 2), "stride": (2, 2), "groups": 2 * LANES}
    ),
    "depthwise, dilated": (
        (2, LANES, 5, 4), (LANES, 1, 3, 3), {"padding": (1, 2), "dilation": (2, 2), "groups": LANES}
    ),
    "depthwise, single pixels": ((4, 3 * LANES, 1, 1), (3 * LANES, 1, 3, 3), {"padding": (1, 1), "groups": 3 * LANES}),
    "gemm": ((3, 5, 4, 3), (7, 5, 1, 1), {}),
}  # fmt: skip


class Case:
    def __init__(self, name: str, *, has_bias: bool = False, is_weight_turned: bool = False) -> None:
        torch.manual_seed(0)
        shape, weight, options = CASES[name]
        self.stride, self.padding = options.get("stride", (1, 1)), options.get("padding", (0, 0))
        self.dilation, self.groups = options.get("dilation", (1, 1)), options.get("groups", 1)
        self.x, self.weight = torch.randn(shape).contiguous(memory_format=torch.channels_last), torch.randn(weight)
        if is_weight_turned:
            self.weight = self.weight.contiguous(memory_format=torch.channels_last)
        self.bias = torch.randn(weight[0]) if has_bias else None
        x, kernel = self.x.double().requires_grad_(), self.weight.double().requires_grad_()
        bias = None if self.bias is None else self.bias.double()
        y = torch.nn.functional.conv2d(x, kernel, bias, self.stride, self.padding, self.dilation, self.groups)
        self.dy = torch.randn(y.shape).contiguous(memory_format=torch.channels_last)
        self.exact = dict(zip(("input", "weight"), torch.autograd.grad(y, (x, kernel), self.dy.double()), strict=True))
        self.exact["forward"] = y.detach()

    def operator(self, role: str) -> tuple[Operator, list[Tensor]]:
        if role == "forward":
            padding = tuple((size, size) for size in self.padding)
            kind: Any = Convolution(self.stride, padding, self.dilation, self.groups, self.bias is not None)
            inputs = [self.x, self.weight, *([] if self.bias is None else [self.bias])]
        else:
            mask = (role == "input", role == "weight", False)
            rest = None, self.stride, self.padding, self.dilation, False, (0, 0), self.groups, mask
            kind, inputs = Aten(GRADIENT, (Input(0), Input(1), Input(2), *rest)), [self.dy, self.x, self.weight]
        count = len(inputs)
        return Operator("convolution", kind, tuple(range(count)), (count,)), inputs


def run(case: Case, role: str, num_threads: int) -> Tensor:
    operator, inputs = case.operator(role)
    views = [View.of(tensor) for tensor in inputs]
    work = work_of(operator, views, [View(0, "float32", tuple(case.exact[role].shape), ())])
    assert work is not None
    if way_of(work, LANES) == "gemm":
        return convolutions.pixels(work)(*inputs)
    out = torch.empty_strided(case.exact[role].shape, convolutions.strides_of_result(work)).fill_(float("nan"))
    kernels = convolutions.make_kernels(work, views, View.of(out))
    assert kernels
    for _ in range(2):  # a second run finds what the first left behind
        KernelList(kernels, num_threads).run()
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("role", ["forward", "input", "weight"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_they_compute_what_torch_does(name: str, role: str, num_threads: int):
    case = Case(name)
    made, exact = run(case, role, num_threads), case.exact[role]
    assert (made - exact).abs().max() <= 3e-6 * exact.abs().max()


@pytest.mark.parametrize("name", ["tiles of 4", "tiles of 2", "gemm"])
def test_a_bias_is_added(name: str):
    case = Case(name, has_bias=True)
    made, exact = run(case, "forward", 1), case.exact["forward"]
    assert (made - exact).abs().max() <= 3e-6 * exact.abs().max()


@pytest.mark.parametrize("role", ["forward", "input"])
def test_weights_may_lie_channels_last(role: str):
    case = Case("tiles of 4", is_weight_turned=True)
    made, exact = run(case, role, 1), case.exact[role]
    assert (made - exact).abs().max() <= 3e-6 * exact.abs().max()


def test_results_do_not_depend_on_the_number_of_threads():
    for name in ("tiles of 4", "many blocks", "depthwise"):
        case = Case(name)
        for role in ("input", "weight"):
            assert torch.equal(run(case, role, 1), run(case, role, 3))


def test_others_are_torchs():
    case = Case("tiles of 4")
    operator, inputs = case.operator("weight")
    views = [View.of(tensor) for tensor in inputs]
    out = View(0, "float32", tuple(case.weight.shape), case.weight.stride())
    work = work_of(operator, views, [out])
    assert work is not None
    assert way_of(work, LANES) == "winograd4"
    row_by_row = [views[0], View(0, "float32", views[1].shape, dense(views[1].shape, (0, 1, 2, 3))), views[2]]
    assert convolutions.make_kernels(work, row_by_row, out) == []
    doubles = [View(0, "float64", view.shape, view.strides) for view in views]
    assert work_of(operator, doubles, [out]) is None
    with_bias = Case("depthwise, strided", has_bias=True)
    operator, inputs = with_bias.operator("forward")
    view = View(0, "float32", tuple(with_bias.dy.shape), dense(with_bias.dy.shape, channels_last(4)))
    work = work_of(operator, [View.of(tensor) for tensor in inputs], [view])
    assert work is not None
    assert way_of(work, LANES) is None
