"""Pools, reductions, softmax, layer norms, products, attention and embeddings against torch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from mlsys_nimble.backends.cpu.library import View
from mlsys_nimble.backends.operators import matmul, pool, rows
from mlsys_nimble.ir.operators import Attention, Epilogue, LayerNorm, MatMul, Pool, Reduce, Softmax
from torch import Tensor
from torch.nn import functional

from tests.nimble.native.conftest import error_of, in_pieces


def channels_last(shape: tuple[int, ...], extra: int = 0) -> Tensor:
    return torch.randn(shape[0], *shape[2:], shape[1] + extra)[..., : shape[1]].movedim(-1, 1)


POOLS = {
    "max": Pool("max", (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
    "max ceil": Pool("max", (3, 3), (2, 2), ((0, 1), (0, 1)), (1, 1)),
    "max dilated": Pool("max", (2, 3), (1, 2), ((0, 0), (1, 1)), (2, 1)),
    "average": Pool("average", (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
    "average counted": Pool("average", (3, 3), (2, 1), ((1, 1), (1, 1)), (1, 1), counts_padding=True),
    "average ragged": Pool("average", (3, 2), (2, 2), ((0, 1), (1, 0)), (1, 1)),
    "global": Pool("average", (10, 8), (1, 1), ((0, 0), (0, 0)), (1, 1)),
}


def pooled(kind: Pool, x: Tensor) -> Tensor:
    """By unfolding, with padding as what it is."""
    around = [amount for pair in reversed(kind.padding) for amount in pair]
    filler = float("-inf") if kind.op == "max" else 0.0
    windows = functional.unfold(
        functional.pad(x, around, value=filler), kind.kernel, dilation=kind.dilation, stride=kind.stride
    ).unflatten(1, (x.shape[1], -1))
    size = [
        (x.shape[2 + d] + sum(kind.padding[d]) - kind.dilation[d] * (kind.kernel[d] - 1) - 1) // kind.stride[d] + 1
        for d in range(2)
    ]
    if kind.op == "max":
        return windows.amax(2).unflatten(2, size)
    ones = functional.unfold(functional.pad(torch.ones_like(x), around), kind.kernel, stride=kind.stride)
    counts = ones.unflatten(1, (x.shape[1], -1)).sum(2)
    if kind.counts_padding:
        counts = torch.full_like(counts, windows.shape[2])
    return (windows.sum(2) / counts).unflatten(2, size)


@pytest.mark.parametrize("channels", [3, 16, 44])
@pytest.mark.parametrize("case", POOLS)
def test_pools_are_torchs(case: str, channels: int, native: Any):
    kind = POOLS[case]
    x = channels_last((2, channels, 10, 8), 3)
    expected = pooled(kind, x.double())
    out = channels_last(tuple(expected.shape), 2)
    assert error_of(in_pieces(pool.pool(kind, View.of(x), View.of(out)), out), expected) < 1e-6
    kind = replace(kind, epilogue=Epilogue("relu", has_residual=True))
    expected, view = (expected + out).relu(), View.of(out)
    assert error_of(in_pieces(pool.pool(kind, View.of(x), view, residual=view), out), expected) < 1e-6


def test_a_maximum_keeps_nan(native: Any):
    x = torch.zeros(1, 8, 1, 5).contiguous(memory_format=torch.channels_last)
    x[0, 3, 0, 2] = torch.nan
    out = torch.zeros(1, 8, 1, 3).contiguous(memory_format=torch.channels_last)
    pool.pool(Pool("max", (1, 3), (1, 1), ((0, 0), (0, 0)), (1, 1)), View.of(x), View.of(out)).run()
    assert out[0, 3].isnan().all()
    assert not out[0, 4].isnan().any()


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dims", [(0,), (1,), (2, 3), (1, 3), (3,), (0, 1, 2, 3), (0, 2)], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_reductions_are_torchs(
    op: Literal["sum", "mean", "max", "min"],
    dims: tuple[int, ...],
    last: bool,
    keeps: bool,
    native: Any,
):
    torch.manual_seed(0)
    x = torch.randn(3, 20, 9, 35)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    function = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[op]
    expected = function(x.double(), dims, keeps)
    out = torch.zeros(expected.shape)
    in_pieces(rows.reduce(Reduce(op, dims, keeps), View.of(x), View.of(out)), out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5 if op == "sum" else 1e-6)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dims", [(1,), (2, 3), (0, 2)], ids=str)
def test_squares_are_reduced(op: Literal["sum", "mean"], dims: tuple[int, ...], native: Any):
    x = torch.randn(3, 20, 9, 35).contiguous(memory_format=torch.channels_last)
    expected = (torch.sum if op == "sum" else torch.mean)(x.double().square(), dims, True)
    out = torch.zeros(expected.shape)
    kind = Reduce(op, dims, keeps_dims=True, squares=True)
    in_pieces(rows.reduce(kind, View.of(x), View.of(out)), out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 7, 33), (2, 128, 128), (5, 1, 3), (1, 2000, 2), (2, 5000, 19)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("is_log", [False, True])
def test_softmax_is_torchs(shape: tuple[int, ...], dim: int, is_log: bool, native: Any):
    x = torch.randn(shape) * 5
    expected = (torch.log_softmax if is_log else torch.softmax)(x.double(), dim)
    view = View.of(x)
    in_pieces(rows.softmax(Softmax(dim, is_log), view, view), x)
    torch.testing.assert_close(x.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_a_softmax_over_tokens_reads_heads_where_they_lie(heads: int, native: Any):
    qkv = torch.randn(2, 70, 3, heads, 19) * 5  # of which keys are one part
    x, out = qkv[:, :, 1].permute(0, 2, 1, 3), torch.zeros(2, 70, heads, 19).permute(0, 2, 1, 3)
    x[1, 0, 5, 0] = -torch.inf
    in_pieces(rows.softmax(Softmax(2), View.of(x), View.of(out)), out)
    torch.testing.assert_close(out.double(), torch.softmax(x.double(), 2), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [1, 8, 40, 64, 96, 192, 200], ids=str)
def test_a_layer_norm_of_any_size_keeps_to_its_row(size: int, native: Any):
    x = torch.randn(5, size) * 3 + 1
    weight, bias = torch.randn(size), torch.randn(size)
    expected = functional.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
    out = torch.full((7, size), 7.0)
    kind = LayerNorm(1, 1e-5, has_weight=True, has_bias=True)
    in_pieces(rows.layer_norm(kind, View.of(x), weight, bias, View.of(out[1:6])), out)
    torch.testing.assert_close(out[1:6].double(), expected, rtol=1e-5, atol=3e-6)
    assert (out[[0, 6]] == 7).all()


@pytest.mark.parametrize("num_dims", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_layer_norms_are_torchs(num_dims: int, affine: bool, transposed: bool, native: Any):
    x = torch.randn(3, 44, 19).transpose(1, 2) if transposed else torch.randn(3, 19, 44)
    x = x * 3 + 1
    shape = x.shape[3 - num_dims :]
    weight, bias = (torch.randn(shape), torch.randn(shape)) if affine else (None, None)
    doubles = [None if values is None else values.double() for values in (weight, bias)]
    expected = functional.layer_norm(x.double(), shape, *doubles, 1e-5)
    out = torch.zeros(3, 19, 44)
    kind = LayerNorm(num_dims, 1e-5, affine, affine)
    in_pieces(rows.layer_norm(kind, View.of(x), weight, bias, View.of(out)), out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("sizes", [(1, 5, 1), (7, 33, 40), (200, 64, 24), (128, 128, 64)], ids=str)
@pytest.mark.parametrize("orders", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_products_are_torchs(sizes: tuple[int, int, int], orders: tuple[bool, bool], native: Any):
    m, k, n = sizes
    a = torch.randn(2, 3, k, m).mT if orders[0] else torch.randn(2, 3, m, k)
    b = torch.randn(2, n, 3, k).permute(0, 2, 3, 1) if orders[1] else torch.randn(2, k, 3, n).transpose(1, 2)
    out = torch.zeros(2, m, 3, n).transpose(1, 2)
    in_pieces(matmul.matmul(MatMul(0.125), View.of(a), View.of(b), View.of(out)), out)
    assert error_of(out, a.double() @ b.double() * 0.125) < 3e-6


@pytest.mark.parametrize("batch", [(), (5,), (2, 3, 4)], ids=str)
def test_products_of_any_rank(batch: tuple[int, ...], native: Any):
    a, b, out = torch.randn(*batch, 4, 9), torch.randn(*batch, 9, 6), torch.zeros(*batch, 4, 6)
    in_pieces(matmul.matmul(MatMul(), View.of(a), View.of(b), View.of(out)), out)
    assert error_of(out, a.double() @ b.double()) < 3e-6


@pytest.mark.parametrize("sizes", [(128, 128, 64, 64), (1, 37, 32, 32), (50, 50, 24, 40), (19, 23, 7, 5)], ids=str)
@pytest.mark.parametrize("masked", ["no", "causal", "padding", "bias"])
def test_attention_is_torchs(sizes: tuple[int, int, int, int], masked: str, native: Any):
    torch.manual_seed(4)
    length, keys, depth, width = sizes
    q, k, v = (torch.randn(2, n, 3, d).transpose(1, 2) for n, d in ((length, depth), (keys, depth), (keys, width)))
    mask = None
    if masked == "padding":
        mask = torch.zeros(2, 1, 1, keys)
        mask[1, ..., keys // 2 :] = -torch.inf
    if masked == "bias":
        mask = torch.randn(1, 3, length, keys)
    out = torch.zeros(2, length, 3, width).transpose(1, 2)
    kind = Attention(depth**-0.5, is_causal=masked == "causal", has_mask=mask is not None)
    kernel = matmul.attention(
        kind, View.of(q), View.of(k), View.of(v), View.of(out), mask=None if mask is None else View.of(mask)
    )
    expected = functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), None if mask is None else mask.double(), is_causal=kind.is_causal
    )
    assert error_of(in_pieces(kernel, out), expected) < 3e-6


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_embeddings_are_torchs(dtype: torch.dtype, native: Any):
    table, indices = torch.randn(30, 21), torch.randint(0, 30, (4, 50), dtype=dtype)
    out = torch.zeros(4, 50, 21)
    kernel = rows.embedding(table, View.of(indices), View.of(out))
    in_pieces(kernel, out)
    assert torch.equal(out, table[indices])
    assert kernel.fault is not None
    assert not kernel.fault.value
    indices[1, 1] = 30
    kernel.run()
    assert kernel.fault.value
