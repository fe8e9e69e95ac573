"""Copies of any strides and dtypes, and borders, against torch: the same bits."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from mlsys_nimble.backends.cpu.library import DTYPES, View
from mlsys_nimble.backends.operators import shapes
from mlsys_nimble.ir.operators import Pad
from torch.nn import functional

from tests.nimble.native.conftest import in_pieces


@pytest.mark.parametrize("dims", list(permutations(range(4))), ids=str)
def test_every_order_of_dimensions(dims: tuple[int, ...], native: Any):
    x = torch.randn(3, 5, 70, 18).permute(dims)
    for out in (torch.zeros(x.shape), torch.zeros(*x.shape[:3], x.shape[3] + 3)[..., :-3]):
        in_pieces(shapes.copy(View.of(x), View.of(out)), out)
        assert torch.equal(out, x)


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("of", DTYPES)
def test_casts_are_torchs(of: str, to: str, native: Any):
    x = torch.tensor([[0, 1, 2, 100, 255, 1000.5, -3.7], [0.3, 1.00390625, 2.01171875, 7, 8, 9, 0]]).to(
        getattr(torch, of)
    )
    if to == "uint8" and of not in ("bool", "uint8"):
        x = x.abs().clamp_max(255)
    out = torch.zeros(7, 2, dtype=getattr(torch, to)).T
    in_pieces(shapes.copy(View.of(x), View.of(out)), out)
    assert torch.equal(out, x.to(out.dtype))


def test_a_long_row_is_cut(native: Any):
    x, out = torch.arange(100_003), torch.zeros(100_003, dtype=torch.int64)
    kernel = shapes.copy(View.of(x), View.of(out))
    assert kernel.units > 4
    assert torch.equal(in_pieces(kernel, out), x)


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1, 1), (2, 1, 3, 1, 2, 2)], ids=str)
def test_few_elements_or_none(shape: tuple[int, ...], native: Any):
    x, out = torch.randn(shape), torch.zeros(shape)
    shapes.copy(View.of(x), View.of(out)).run()
    assert torch.equal(out, x)


def test_expanded(native: Any):
    x, out = torch.randn(4, 1, 6).expand(4, 50, 6), torch.zeros(4, 50, 6)
    assert torch.equal(in_pieces(shapes.copy(View.of(x), View.of(out)), out), x)


@pytest.mark.parametrize("amounts", [((0, 0), (0, 0), (1, 2), (3, 0)), ((1, 0), (-2, 3), (-1, -1), (0, 2))], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_borders(amounts: tuple[tuple[int, int], ...], last: bool, native: Any):
    x = torch.randn(2, 5, 6, 7)
    flat = [amount for pair in reversed(amounts) for amount in pair]
    expected = functional.pad(x, flat, value=-1.5)
    out = torch.zeros(expected.shape)
    if last:
        x, out = x.contiguous(memory_format=torch.channels_last), out.contiguous(memory_format=torch.channels_last)
    in_pieces(shapes.pad(Pad(amounts, -1.5), View.of(x), View.of(out)), out)
    assert torch.equal(out, expected)
