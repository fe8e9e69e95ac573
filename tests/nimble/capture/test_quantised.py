"""Quantised graphs, as PT2E writes them: equal to torch's, products of whole numbers, and never slow unsaid."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from mlsys_nimble import CaptureError, Nimble, load
from mlsys_nimble.backends.cpu.executor import NativeExecutor
from mlsys_nimble.ir.operators import Aten, Cast, Convolution, Copy, Dequantise, IntegerProduct, Linear
from torch import Tensor, nn

ops = torch.ops.quantized_decomposed
RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


class Rounded(nn.Module):
    """A linear layer with a quantised weight, between two pairs of quantise and dequantise."""

    def __init__(self, dtype: torch.dtype, zero_point: int) -> None:
        super().__init__()
        self.how = (0.037, zero_point, *RANGES[dtype], dtype)
        self.register_buffer("weight", torch.randint(-127, 128, (6, 20), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(6) / 64)
        self.register_buffer("zeros", torch.zeros(6, dtype=torch.int64))

    def rounded(self, x: Tensor) -> Tensor:
        y: Tensor = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *self.how), *self.how)
        return y

    def forward(self, x: Tensor) -> Tensor:
        weight = ops.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
        return self.rounded(nn.functional.linear(self.rounded(x), weight).relu())


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("executor", ["native", "reference"])
@pytest.mark.parametrize(("dtype", "zero_point"), [(torch.int8, 0), (torch.int8, -9), (torch.uint8, 131)])
def test_a_static_graph_is_torchs(dtype: torch.dtype, zero_point: int, executor: str):
    model, x = Rounded(dtype, zero_point), torch.randn(4, 20) * 2
    prepared = Nimble(model).prepare(x, executor=executor)
    off = (prepared(x) - model(x)).abs()  # a product on the border of two steps may round to the other
    assert float(off.max()) <= 0.037 * 1.001
    assert int((off > 1e-5).sum()) <= 1
    assert prepared.prepared is not None
    assert not any(isinstance(each.kind, Aten | Cast) for each in prepared.prepared.program.operators)
    assert sum(isinstance(each.kind, IntegerProduct) for each in prepared.prepared.program.operators) == 1


@pytest.mark.parametrize("dtype", RANGES)
def test_codes_are_torchs_to_the_bit(dtype: torch.dtype):
    class Both(nn.Module):
        def forward(self, x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
            how = (0.05, 3, *RANGES[dtype], dtype)
            return ops.quantize_per_tensor(x, *how), ops.dequantize_per_tensor(codes, *how)

    low, high = RANGES[dtype]
    halves = torch.arange(-400, 400) * 0.025  # half of them lie between two codes
    inputs = torch.cat([halves, torch.randn(1000) * 9]), torch.arange(low, high + 1).to(dtype)
    for executor in ("native", "reference"):
        found = Nimble(Both()).prepare(inputs, executor=executor)(*inputs)
        assert all(map(torch.equal, found, Both()(*inputs)))


def test_scales_that_each_call_measures():
    class Dynamic(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale, zero = ops.choose_qparams.tensor(x, -128, 127, 1e-5, torch.int8)
            how = scale, zero, -128, 127, torch.int8
            y: Tensor = ops.dequantize_per_tensor.tensor(ops.quantize_per_tensor.tensor(x, *how), *how)
            return y

    x = torch.randn(8, 33)
    prepared = Nimble(Dynamic()).prepare(x)
    for factor in (1, 5):
        torch.testing.assert_close(prepared(x * factor), Dynamic()(x * factor), rtol=1e-6, atol=1e-6)


def pair(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Quantise and dequantise."""
    how = (scale, zero_point, *RANGES[dtype], dtype)
    y: Tensor = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *how), *how)
    return y


class Layer(nn.Module):
    """A convolution or linear whose weight is int8 by output channel, as PT2E leaves it."""

    def __init__(self, model: nn.Conv2d | nn.Linear) -> None:
        super().__init__()
        self.model = model
        weight = model.weight.detach()
        scales = weight.flatten(1).abs().amax(1) / 127
        self.register_buffer("codes", (weight / scales.reshape(-1, *(1,) * (weight.dim() - 1))).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        weight = ops.dequantize_per_channel(self.codes, self.scales, self.zeros, 0, -128, 127, torch.int8)
        m = self.model
        if isinstance(m, nn.Linear):
            return nn.functional.linear(x, weight, m.bias)
        return nn.functional.conv2d(x, weight, m.bias, m.stride, m.padding, m.dilation, m.groups)


class Small(nn.Module):
    """Convolutions of all forms, a maximum, a concatenation, a residual and a linear, with codes between them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first, self.deep = Layer(nn.Conv2d(3, 16, 3, 2, 1)), Layer(nn.Conv2d(16, 16, 3, 1, 1, groups=16))
        self.one, self.grouped = Layer(nn.Conv2d(16, 16, 1)), Layer(nn.Conv2d(32, 24, 3, 1, 1, groups=4, bias=False))
        self.head = Layer(nn.Linear(24, 10))

    def forward(self, x: Tensor) -> Tensor:
        middle = 0 if self.dtype == torch.int8 else 128
        low = middle - 128

        def rounded(y: Tensor, scale: float, zero_point: int) -> Tensor:
            return pair(y, scale, zero_point, self.dtype)

        x = rounded(self.first(rounded(x, 0.02, middle)).relu(), 0.01, low)
        x = rounded(nn.functional.max_pool2d(x, 3, 2, 1), 0.01, low)
        y = rounded(nn.functional.relu6(self.deep(x)), 0.008, low)
        z = rounded((self.one(y) + x).relu(), 0.015, low)
        both = rounded(torch.cat([z, rounded(z, 0.015, low)], 1), 0.015, low)
        pooled = nn.functional.gelu(self.grouped(both)).mean((2, 3))
        return self.head(rounded(pooled, 0.003, middle))


@pytest.mark.parametrize("dtype", RANGES)
def test_products_of_codes_are_eagers(dtype: torch.dtype, caplog: pytest.LogCaptureFixture):
    model, x = Small(dtype).eval(), torch.rand(2, 3, 23, 21) * 4 - 2
    with caplog.at_level(logging.WARNING, logger="mlsys_nimble"):
        prepared = Nimble(model).prepare(x)
    assert not caplog.records
    assert prepared.prepared is not None
    kinds = [type(each.kind) for each in prepared.prepared.program.operators]
    assert kinds.count(IntegerProduct) == 5
    assert not {Aten, Cast, Convolution, Linear}.intersection(kinds)
    assert kinds.count(Dequantise) == 0
    executor = prepared.prepared.executor
    assert isinstance(executor, NativeExecutor)
    copies = [each.name for each in executor.schedule.layout.program.operators if isinstance(each.kind, Copy)]
    assert not any(name.startswith("input") for name in copies)  # planes are rounded as they come
    for factor in (1.0, 0.5):
        expected = model(x * factor)
        # Sums are exact in both but for eager's own rounding: a code may differ by one here and there.
        torch.testing.assert_close(prepared(x * factor), expected, rtol=0, atol=0.004 * float(expected.abs().max()))
    reference = Nimble(model).prepare(x, executor="reference")
    torch.testing.assert_close(reference(x), model(x), rtol=0, atol=1e-6)


def test_products_of_codes_survive_a_file_and_other_sizes(tmp_path: Path):
    model, x = Small(torch.uint8).eval(), torch.rand(2, 3, 23, 21)
    prepared = Nimble(model).prepare(x)
    prepared.save(tmp_path / "small.nimble")
    assert torch.equal(load(tmp_path / "small.nimble")(x), prepared(x))
    ranged = Nimble(model).prepare(x, dynamic={"x": {0: (1, 8)}})
    for batch in (1, 5):
        other = torch.rand(batch, 3, 23, 21)
        assert torch.equal(ranged(other), Nimble(model).prepare(other)(other))


def test_linears_whose_scales_each_call_measures():
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(nn.Linear(33, 40)), Layer(nn.Linear(40, 7))])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                scale, zero = ops.choose_qparams.tensor(x, 0, 255, 1e-5, torch.uint8)
                how = scale, zero, 0, 255, torch.uint8
                x = layer(ops.dequantize_per_tensor.tensor(ops.quantize_per_tensor.tensor(x, *how), *how)).relu()
            return x

    model, x = Dynamic(), torch.randn(3, 8, 33)
    for executor in ("native", "reference"):
        prepared = Nimble(model).prepare(x, executor=executor)
        assert prepared.prepared is not None
        kinds = [type(each.kind) for each in prepared.prepared.program.operators]
        assert kinds.count(IntegerProduct) == 2
        assert Aten not in kinds
        for factor in (1, 7):
            expected = model(x * factor)
            torch.testing.assert_close(prepared(x * factor), expected, rtol=0, atol=0.008 * float(expected.abs().max()))


class Measured(nn.Module):
    """Floats of codes, rounded to a scale that is measured: not the codes, though theirs is 1."""

    def forward(self, codes: Tensor) -> Tensor:
        x = ops.dequantize_per_tensor(codes, 1.0, 0, 0, 255, torch.uint8)
        scale, zero = ops.choose_qparams(x, 0, 255, 1e-6, torch.uint8)
        again = ops.quantize_per_tensor(x, scale, zero, 0, 255, torch.uint8)
        y: Tensor = ops.dequantize_per_tensor(again, scale, zero, 0, 255, torch.uint8)
        return y


class Narrow(nn.Module):
    """Codes that may lie beyond the range to which they are rounded again."""

    def forward(self, codes: Tensor) -> Tensor:
        how = (0.5, 3, 0, 127, torch.uint8)
        x = ops.dequantize_per_tensor(codes, *how)
        joined = torch.cat([x, ops.dequantize_per_tensor(codes.flip(0), *how)], 1)
        pair = [ops.dequantize_per_tensor(ops.quantize_per_tensor(each, *how), *how) for each in (x, joined)]
        return torch.cat(pair, 1)


@pytest.mark.parametrize("model", [Measured(), Narrow()])
def test_rounding_that_changes_codes_is_kept(model: nn.Module):
    codes = torch.randint(0, 256, (2, 8), dtype=torch.uint8)
    codes[0, 0] = 200
    torch.testing.assert_close(Nimble(model).prepare(codes)(codes), model(codes))


def test_products_that_stay_floats_are_said_once(caplog: pytest.LogCaptureFixture):
    class Skewed(Layer):  # a weight with zero points
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(pair(x, 0.05, 100))

    model = Skewed(nn.Linear(20, 6))
    model.zeros += 3
    with caplog.at_level(logging.WARNING, logger="mlsys_nimble"):
        prepared = Nimble(model).prepare(torch.randn(4, 20))
        prepared(torch.randn(7, 20))
        Nimble(nn.Linear(3, 3)).prepare(torch.randn(1, 3))
    x = torch.randn(4, 20)
    torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-5)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the model is quantised, but 1 of its products run in float32 on rounded values. Products")


@pytest.mark.filterwarnings("ignore")  # torch.ao's own, that PT2E is its successor
def test_weights_packed_by_torch_are_refused_with_the_way_out():
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(CaptureError, match=r"packed into an object.*\n?.*PT2E"):
        Nimble(model).prepare(torch.randn(2, 8))
