"""Rows of an embedding in codes, looked up by compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_orca.backends.native.iteration import look_up_native
from mlsys_orca.model.weights.quantized import QuantizedMatrix, pack_nibbles


def table_of(bits: int, group: int, dtype: torch.dtype, *, has_offsets: bool) -> QuantizedMatrix:
    torch.manual_seed(bits + group)
    codes = torch.randint(-127, 128, (40, 96), dtype=torch.int8)
    if bits == 4:
        codes = pack_nibbles(torch.randint(0, 16, (40, 96), dtype=torch.uint8))
    scales = (torch.rand(40, 96 // group) * 0.02).to(dtype)
    scales[3] = 1e-7  # a subnormal half
    offsets = torch.randn_like(scales) * 0.1 if has_offsets else None
    return QuantizedMatrix(codes=codes, scales=scales, offsets=offsets)


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_those_of_torch(native: Any, bits: int, group: int, dtype: torch.dtype, has_offsets: bool) -> None:
    table = table_of(bits, group, dtype, has_offsets=has_offsets)
    ids = torch.tensor([39, 3, 0, 3, 17])
    torch.testing.assert_close(look_up_native(table, ids), table.dequantized()[ids], rtol=2e-7, atol=1e-7)
    apart = table.map(lambda part: part.repeat_interleave(2, dim=0)[::2])
    torch.testing.assert_close(look_up_native(apart, ids[::2]), look_up_native(table, ids[::2].contiguous()))


@pytest.mark.parametrize("wrong", [-1, 40])
def test_a_row_that_there_is_not(native: Any, wrong: int) -> None:
    with pytest.raises(IndexError, match=f"no token {wrong}: the embedding has 40 rows"):
        look_up_native(table_of(8, 16, torch.float32, has_offsets=False), torch.tensor([2, wrong]))


def test_floats_are_torch_s() -> None:
    table = torch.randn(5, 4)
    assert torch.equal(look_up_native(table, torch.tensor([4, 0])), table[[4, 0]])
