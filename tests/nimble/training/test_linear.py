"""Kernels of linear layers and layer norms in training beside torch in float64."""

from __future__ import annotations

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.ir.operators import Aten, Epilogue, Gemm, Input, WeightGradient
from mlsys_nimble.ir.program import Operator
from mlsys_nimble.training import transformer
from mlsys_nimble.training.kernels import KernelList
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("kernel_level")

LANES = 16  # of the widest build; narrower ones take its multiples too
WIDTHS = [(1, LANES), (5, 2 * LANES), (300, 3 * LANES), (LANES, 8 * LANES)]  # of features and columns


def rows(*shape: int, is_transposed: bool) -> Tensor:
    """Rows as they come, or with the first two dimensions in the other order in memory."""
    if is_transposed:
        return torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return torch.randn(shape)


def run(operator: Operator, inputs: list[Tensor], shapes: list[tuple[int, ...]], num_threads: int) -> list[Tensor]:
    views = [View.of(tensor) for tensor in inputs]
    strides = transformer.linear_strides(operator, views)
    assert strides is not None
    outputs = [
        torch.empty_strided(shape, step).fill_(float("nan")) for shape, step in zip(shapes, strides, strict=True)
    ]
    assert isinstance(operator.kind, Gemm | WeightGradient)
    kernels = transformer.linear_kernels(operator.kind, views, [View.of(tensor) for tensor in outputs])
    KernelList(kernels, num_threads).run()
    return outputs


@pytest.mark.parametrize(("depth", "columns"), WIDTHS)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("extras", ["", "bias", "bias residual relu", "residual", "mask", "residual mask"])
def test_gemms_and_their_epilogues(depth: int, columns: int, is_transposed: bool, num_threads: int, extras: str):
    torch.manual_seed(0)
    shape = (9, 15, columns)
    a = rows(9, 15, depth, is_transposed=is_transposed)
    b = torch.randn(columns, depth).t() if is_transposed else torch.randn(depth, columns)
    bias, residual, mask = (
        torch.randn(columns),
        rows(*shape, is_transposed=is_transposed),
        rows(*shape, is_transposed=is_transposed),
    )
    epilogue = Epilogue("relu" if "relu" in extras else None, has_residual="residual" in extras)
    kind = Gemm(has_bias="bias" in extras, has_mask="mask" in extras, epilogue=epilogue)
    inputs = [a, b, *([bias] if kind.has_bias else []), *([mask] if kind.has_mask else [])]
    inputs += [residual] if epilogue.has_residual else []
    wanted = a.double() @ b.double() + (bias.double() if kind.has_bias else 0)
    wanted = wanted + residual.double() if epilogue.has_residual else wanted
    wanted = wanted.relu() if "relu" in extras else wanted
    wanted = wanted * (mask > 0) if kind.has_mask else wanted
    operator = Operator("gemm", kind, tuple(range(len(inputs))), (9,))
    (made,) = run(operator, inputs, [shape], num_threads)
    assert (made.stride() == a.stride()) == (depth == columns)
    torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("columns", "features"), [(LANES, LANES), (20 * LANES, 2 * LANES), (3 * LANES, 7 * LANES)])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_gradients_of_weights_and_biases(
    columns: int, features: int, is_transposed: bool, has_bias: bool, num_threads: int
):
    torch.manual_seed(0)
    dy, x = rows(13, 23, columns, is_transposed=is_transposed), rows(13, 23, features, is_transposed=not is_transposed)
    operator = Operator("gradient", WeightGradient(has_bias=has_bias), (0, 1), (2, 3)[: 1 + has_bias])
    shapes = [(columns, features), (columns,)][: 1 + has_bias]
    made = run(operator, [dy, x], shapes, num_threads)
    wanted = dy.double().reshape(-1, columns).t() @ x.double().reshape(-1, features)
    torch.testing.assert_close(made[0].double(), wanted, rtol=1e-5, atol=1e-4)
    if has_bias:
        torch.testing.assert_close(made[1].double(), dy.double().sum((0, 1)), rtol=1e-5, atol=1e-4)


def test_other_dtypes_and_strides_are_left_to_torch():
    def takes(a: Tensor, b: Tensor) -> bool:
        return transformer.linear_strides(Operator("p", Gemm(), (0, 1), (2,)), [View.of(a), View.of(b)]) is not None

    a, b = torch.randn(7, 5), torch.randn(5, LANES)
    assert takes(a, b)
    assert not takes(a.double(), b.double())
    assert not takes(torch.randn(5, 7).t(), b)
    assert not takes(a, torch.randn(5, LANES + 1))
    views = [View.of(tensor) for tensor in (a, b, torch.randn(2 * LANES)[::2])]
    assert transformer.linear_strides(Operator("p", Gemm(has_bias=True), (0, 1, 2), (3,)), views) is None


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_layer_norms_and_their_gradients(is_transposed: bool, num_threads: int):
    torch.manual_seed(0)
    width = 3 * LANES
    x, dy = rows(11, 17, width, is_transposed=is_transposed) + 3, rows(11, 17, width, is_transposed=False)
    weight, bias = torch.randn(width), torch.randn(width)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    wanted = torch.nn.functional.layer_norm(exact[0], (width,), *exact[1:], 1e-5)

    def run_norm(name: str, arguments: tuple[object, ...], inputs: list[Tensor], shapes: list[torch.Size]):
        operator = Operator("norm", Aten(name, arguments), tuple(range(len(inputs))), (7, 8, 9))
        views = [View.of(tensor) for tensor in inputs]
        strides = transformer.norm_strides(operator, views)
        assert strides is not None
        outputs = [
            torch.empty_strided(shape, step).fill_(float("nan")) for shape, step in zip(shapes, strides, strict=True)
        ]
        KernelList(transformer.norm_kernels(operator, views, list(map(View.of, outputs))), num_threads).run()
        return outputs

    name = "aten.native_layer_norm"
    forward = (Input(0), (width,), Input(1), Input(2), 1e-5)
    statistics = torch.Size((11, 17, 1))
    y, mean, rstd = run_norm(f"{name}.default", forward, [x, weight, bias], [x.shape, statistics, statistics])
    torch.testing.assert_close(y.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mean, x.mean(-1, keepdim=True), rtol=1e-5, atol=1e-5)
    backward = (Input(0), Input(1), (width,), *map(Input, range(2, 6)), (True, True, True))
    inputs = [dy, x, mean, rstd, weight, bias]
    made = run_norm(f"{name}_backward.default", backward, inputs, [x.shape, weight.shape, bias.shape])
    for ours, theirs in zip(made, torch.autograd.grad(wanted, exact, dy.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


class Norm(nn.Module):
    def __init__(self, num_dims: int, *, has_weight: bool) -> None:
        super().__init__()
        self.num_dims = num_dims
        self.weight = nn.Parameter(torch.rand(8)) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-self.num_dims :], self.weight)


@pytest.mark.parametrize(("num_dims", "has_weight"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)])
def test_without_weight_or_bias(shape: tuple[int, ...], num_dims: int, has_weight: bool):
    torch.manual_seed(0)
    net = Norm(num_dims, has_weight=has_weight)
    found = []
    for model in (net, Nimble(net).prepare(torch.zeros(shape, requires_grad=True), training=True)):
        x = torch.linspace(-1, 2, 8 * torch.Size(shape[:-1]).numel()).square().reshape(shape).requires_grad_()
        y = model(x)
        net.zero_grad()
        (y * torch.arange(8)).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in net.parameters())])
    for ours, eager in zip(*found[::-1], strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
