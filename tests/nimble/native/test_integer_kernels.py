"""Products of codes against whole numbers in int64: exact sums, whatever the machine multiplies with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from mlsys_nimble.backends.cpu import integers
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.backends.operators.integers import FAMILY
from mlsys_nimble.ir.operators import NOTHING, ChooseScale, Codes, Convolution, Epilogue, IntegerProduct, Pool
from mlsys_nimble.ir.program import ValueType
from torch import Tensor
from torch.nn import functional

from tests.nimble.native.conftest import in_pieces

X, UNIT = Codes(0.05, 131, 0, 255), Codes(1.0, 131, 0, 255)


def last(tensor: Tensor, extra: int = 0) -> Tensor:
    """The tensor [N, C, *space] with channels side by side, pixels ``C + extra`` apart."""
    moved = functional.pad(tensor.movedim(1, -1), (0, extra)).contiguous()
    return moved[..., : tensor.shape[1]].movedim(-1, 1)


def random_codes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


CASES = {  # channels, columns, groups, kernel, stride, padding, dilation, space
    "linear": (64, 40, 1, (1,), (1,), (0,), (1,), (23,)),
    "odd linear": (37, 7, 1, (1,), (1,), (0,), (1,), (5,)),
    "image": (3, 32, 1, (7, 7), (2, 2), (3, 3), (1, 1), (19, 23)),
    "window": (20, 48, 1, (3, 3), (1, 1), (1, 1), (1, 1), (9, 11)),
    "strided pixels": (32, 33, 1, (1, 1), (2, 2), (0, 0), (1, 1), (7, 9)),
    "line of planes": (2, 9, 1, (5,), (1,), (2,), (1,), (41,)),
    "wide": (4, 24, 1, (3, 3), (1, 1), (1, 1), (1, 1), (5, 461)),
    "many pixels": (12, 24, 1, (1, 1), (1, 1), (0, 0), (1, 1), (21, 31)),
    "grouped": (24, 40, 4, (3, 3), (2, 1), (1, 2), (1, 1), (8, 7)),
    "dilated": (5, 17, 1, (3, 2), (1, 1), (2, 0), (2, 3), (9, 12)),
    "voxels": (6, 8, 2, (2, 3, 2), (1, 2, 1), (1, 0, 1), (1, 1, 1), (4, 5, 6)),
    "depthwise": (72, 72, 72, (3, 3), (1, 1), (1, 1), (1, 1), (6, 9)),
    "depthwise, halved": (40, 40, 40, (3, 3), (2, 2), (1, 1), (1, 1), (7, 21)),
    "depthwise, strided": (19, 19, 19, (5, 5), (2, 2), (2, 2), (1, 1), (9, 8)),
    "depthwise line": (133, 133, 133, (4,), (1,), (2,), (2,), (15,)),
}


def product_of(case: str, epilogue: Epilogue = NOTHING, **more: Any) -> tuple[IntegerProduct, Tensor, Tensor]:
    """A product, its input and its weight's codes; extremes among both, so that narrow sums would saturate."""
    channels, columns, groups, kernel, stride, padding, dilation, space = CASES[case]
    x = last(random_codes(2, channels, *space), extra=4)
    weight = torch.randint(-128, 128, (columns, channels // groups, *kernel), dtype=torch.int8)
    weight[0], weight[-1] = -128, 127
    x[0, :, 0] = 255
    main = Convolution(stride, tuple((each, each) for each in padding), dilation, groups, True, epilogue)
    return IntegerProduct(main, X, **more), x, weight


def exact(kind: IntegerProduct, x: Tensor, weight: Tensor) -> Tensor:
    """The sums of ``(x - zero point) * weight``, in float64, which holds them all."""
    main = kind.main
    convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[len(main.stride) - 1]
    padding = [before for before, _ in main.padding]
    shifted = x.double() - kind.x.zero_point
    y: Tensor = convolve(shifted, weight.double(), None, main.stride, padding, main.dilation, main.groups)
    return y


@pytest.mark.parametrize("case", CASES)
def test_sums_are_exact(case: str, native: Any):
    torch.manual_seed(len(case))
    kind, x, weight = product_of(case)
    kind = replace(kind, x=UNIT)
    expected = exact(kind, x, weight)
    assert expected.abs().max() < 2**24, "floats hold the sums, so results are equal, not near"
    out = last(torch.zeros_like(expected, dtype=torch.float32), extra=3)
    scales, bias = torch.ones(weight.shape[0]), torch.arange(weight.shape[0]).float()
    kernel = integers.product(kind, View.of(x), weight, scales, bias, View.of(out))
    shape = (-1, *(1,) * (expected.dim() - 2))
    assert torch.equal(in_pieces(kernel, out).double(), expected + bias.double().reshape(shape))


@pytest.mark.parametrize("case", ["image", "line of planes", "wide"])
def test_features_may_lie_apart(case: str, native: Any):
    torch.manual_seed(7)
    kind, x, weight = product_of(case)
    kind = replace(kind, x=UNIT)
    expected = exact(kind, x, weight)
    out = last(torch.zeros_like(expected, dtype=torch.float32))
    scales, planes = torch.ones(weight.shape[0]), x.contiguous()
    kernel = integers.product(kind, View.of(planes), weight, scales, None, View.of(out))
    assert torch.equal(in_pieces(kernel, out).double(), expected)


EPILOGUES = {
    "none": (Epilogue(), None),
    "relu": (Epilogue("relu"), None),
    "relu6": (Epilogue("relu6"), None),
    "gelu": (Epilogue("gelu"), None),
    "codes, relu": (Epilogue("relu", has_residual=True), Codes(0.03, 120, 0, 255)),
    "floats, relu": (Epilogue("relu", has_residual=True), None),
    "codes after silu": (Epilogue("silu", has_residual=True, activates_first=True), Codes(0.03, 120, 0, 255)),
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("case", ["odd linear", "window", "many pixels", "depthwise", "depthwise, halved"])
def test_results_in_codes_are_torchs_to_a_step(case: str, epilogue: str, native: Any):
    torch.manual_seed(3)
    how, residual_codes = EPILOGUES[epilogue]
    kind, x, weight = product_of(case, how, result=Codes(0.11, 90, 3, 250), residual=residual_codes)
    scales, bias = torch.rand(weight.shape[0]) / 100, torch.randn(weight.shape[0])
    shape = exact(kind, x, weight).shape
    residual = last(random_codes(*shape) if residual_codes else torch.randn(shape))
    given = [residual] if how.has_residual else []
    meaning = FAMILY.entries[IntegerProduct].meaning
    assert meaning is not None
    expected = meaning(kind, (), ValueType(tuple(shape), "uint8"))(x, weight, scales, bias, *given)
    out = last(torch.zeros(shape, dtype=torch.uint8), extra=1)
    view = View.of(residual) if given else None
    kernel = integers.product(kind, View.of(x), weight, scales, bias, View.of(out), residual=view)
    off = (in_pieces(kernel, out).int() - expected.int()).abs()
    assert int(off.max()) <= 1  # a sum on the border of two steps, where torch's order of floats rounds to the other
    assert int((off > 0).sum()) <= out.numel() // 200 + 1


@pytest.mark.parametrize("case", ["linear", "grouped", "depthwise, strided"])
def test_scales_of_the_call(case: str, native: Any):
    torch.manual_seed(5)
    kind, x, weight = product_of(case, is_dynamic=True)
    parameters, scales = torch.tensor([0.25, 77.0]), torch.full((weight.shape[0],), 0.5)
    expected = exact(replace(kind, x=Codes(0.25, 77, 0, 255)), x, weight) * 0.125
    out = last(torch.zeros(expected.shape))
    view = View.of(parameters)
    kernel = integers.product(kind, View.of(x), weight, scales, None, View.of(out), parameters=view)
    assert torch.equal(in_pieces(kernel, out).double(), expected)


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4099)])
def test_codes_and_floats_are_torchs_to_the_bit(shape: tuple[int, ...], native: Any):
    how = (0.037, 131, 2, 250, torch.uint8)
    ops = torch.ops.quantized_decomposed
    x = torch.randn(shape) * 4
    x.view(-1)[0], x.view(-1)[1] = 1e30, -1e30
    out, floats = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape)
    codes = Codes(*how[:4])
    assert torch.equal(
        in_pieces(integers.coding(codes, View.of(x), View.of(out)), out), ops.quantize_per_tensor(x, *how)
    )
    turned = random_codes(*reversed(shape)).permute(*reversed(range(len(shape))))
    kernel = integers.coding(codes, View.of(turned), View.of(floats))
    assert torch.equal(in_pieces(kernel, floats), ops.dequantize_per_tensor(turned, *how))


@pytest.mark.parametrize("factor", [3.0, -2.0, 0.0])
def test_a_scale_is_chosen_as_torch_does(factor: float, native: Any):
    x, out = (torch.rand(4, 61) - 0.3)[:, :57] * factor, torch.zeros(2)
    integers.choose_scale(ChooseScale(0, 255, 1e-4), View.of(x), View.of(out)).run()
    scale, zero_point = torch.ops.quantized_decomposed.choose_qparams.tensor(x, 0, 255, 1e-4, torch.uint8)
    assert out.tolist() == [float(scale), float(zero_point)]


def test_maxima_of_codes(native: Any):
    x, out = last(random_codes(2, 70, 9, 8), extra=2), last(torch.zeros(2, 70, 5, 4, dtype=torch.uint8))
    kind = Pool("max", (3, 3), (2, 2), ((1, 1), (1, 0)), (1, 1))
    kernel = integers.codes_pool(kind, View.of(x), View.of(out))
    padded = functional.pad(x.float(), (1, 0, 1, 1), value=-1.0)
    assert torch.equal(in_pieces(kernel, out).float(), functional.max_pool2d(padded, 3, 2))
