"""Linears and convolutions whose weights are kept in bf16 give what they give with the same weights in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu import convolutions, library
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.ir.operators import Convolution, Epilogue, Linear

from tests.nimble.native.conftest import BUILDS, run_in_pieces


@pytest.fixture(scope="module", params=BUILDS)
def libraries(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    flags = BUILDS[request.param]
    return library.load(flags), library.load_bf16(flags)


@pytest.mark.parametrize("columns", [1, 17, 64, 100])
@pytest.mark.parametrize("rows", [1, 2, 13])
def test_linears(rows: int, columns: int, libraries: tuple[Any, Any]):
    torch.manual_seed(0)
    x, bias, residual = torch.randn(rows, 131), torch.randn(columns), torch.randn(rows, columns)
    weight = torch.randn(columns, 131).bfloat16().float()
    kind = Linear(has_bias=True, epilogue=Epilogue("silu", has_residual=True))
    results = []
    for one in libraries:
        out = torch.zeros(rows, columns)
        views = View.of(x), weight, bias, View.of(out)
        results.append(run_in_pieces(convolutions.linear(kind, *views, residual=View.of(residual), library=one), out))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", [6, 24])
def test_convolutions(channels: int, groups: int, libraries: tuple[Any, Any]):
    torch.manual_seed(1)
    x = torch.randn(2, channels, 9, 7).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(20, channels // groups, 3, 3).bfloat16().float(), torch.randn(20)
    kind = Convolution((1, 1), ((1, 1), (1, 1)), (1, 1), groups, True, Epilogue("relu"))
    results = []
    for one in libraries:
        out = torch.zeros(2, 20, 9, 7).contiguous(memory_format=torch.channels_last)
        results.append(
            run_in_pieces(convolutions.convolution(kind, View.of(x), weight, bias, View.of(out), library=one), out)
        )
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
