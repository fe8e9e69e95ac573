"""Quantised graphs, as PT2E writes them: equal to torch's, without stored whole numbers, and never slow unsaid."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from mlsys_nimble import CaptureError, Nimble
from mlsys_nimble.ir.operators import Aten, Cast
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
def test_a_static_graph_is_torchs_and_stores_no_whole_numbers(dtype: torch.dtype, zero_point: int, executor: str):
    model, x = Rounded(dtype, zero_point), torch.randn(4, 20) * 2
    prepared = Nimble(model).prepare(x, executor=executor)
    off = (prepared(x) - model(x)).abs()  # a product on the border of two steps may round to the other
    assert float(off.max()) <= 0.037 * 1.001
    assert int((off > 1e-5).sum()) <= 1
    assert prepared.prepared is not None
    assert not any(isinstance(each.kind, Aten | Cast) for each in prepared.prepared.program.operators)


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


def test_a_quantised_model_is_said_once_to_run_in_float32(caplog: pytest.LogCaptureFixture):
    model = Rounded(torch.int8, 0)
    with caplog.at_level(logging.WARNING, logger="mlsys_nimble"):
        prepared = Nimble(model).prepare(torch.randn(4, 20))
        prepared(torch.randn(7, 20))
        Nimble(nn.Linear(3, 3)).prepare(torch.randn(1, 3))
    assert [record.getMessage() for record in caplog.records if "int8 products" in record.getMessage()] == [
        "the model is quantised. Nimble has no int8 products: they run in float32 on the rounded values, which gives "
        "the model's results at float32's speed or less"
    ]


@pytest.mark.filterwarnings("ignore")  # torch.ao's own, that PT2E is its successor
def test_weights_packed_by_torch_are_refused_with_the_way_out():
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(CaptureError, match=r"packed into an object.*\n?.*PT2E"):
        Nimble(model).prepare(torch.randn(2, 8))
