"""Products of codes by quantised rows, against plain numpy: the same bits on every build, for any number of rows."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.native import new
from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.packing import pack
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.weights.quantized import QuantizedMatrix, pack_nibbles
from numpy.typing import NDArray
from torch import Tensor

BLOCKS = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
FORMS = ["nibbles", "q4_0", "q4_1", "bytes", "bytes-offsets", "nibbles-16", "bytes-16", "bytes-offsets-16"]
ROWS = (1, 2, 5, 7, 13, 40)


class Codes(Linear):
    """A product of a quantised matrix, as the loaders make them."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        super().__init__(torch.zeros(matrix.shape), None)
        self.matrix = matrix

    def take_weight(self) -> Any:
        return self.matrix


def matrix_of(form: str, columns: int, depth: int) -> QuantizedMatrix:
    torch.manual_seed(columns * 1000 + depth)
    if form in BLOCKS:
        return k_quant_of(form, columns, depth)
    group = 16 if form.endswith("16") else 32
    scales = torch.rand(columns, depth // group) * 0.02 + 0.01
    if form.startswith("bytes"):
        codes = torch.randint(-128, 128, (columns, depth), dtype=torch.int8)
        codes[0] = -128
        codes[-1] = 127
    else:
        unpacked = torch.randint(0, 16, (columns, depth), dtype=torch.uint8)
        unpacked[0] = 15  # the largest sums that a group can have
        codes = pack_nibbles(unpacked)
    offsets = None
    if form == "q4_0":
        scales = scales.half()
        offsets = -8 * scales
    elif form == "q4_1" or "offsets" in form:
        offsets = torch.randn_like(scales) * 0.1
    return QuantizedMatrix(codes=codes, scales=scales, offsets=offsets)


def k_quant_of(form: str, columns: int, depth: int) -> QuantizedMatrix:
    """A matrix as K-quants are: small whole scales, and factors of blocks; its first rows have the largest sums."""
    group, low, high = {
        "q2_k": (16, 0, 4),
        "q3_k": (16, -4, 4),
        "q4_k": (32, 0, 16),
        "q5_k": (32, 0, 32),
        "q6_k": (16, -32, 32),
    }[form]
    codes = torch.randint(low, high, (columns, depth), dtype=torch.int8)
    codes[0] = high - 1
    codes[-1] = low
    least, most = (-128, 128) if low else (0, 64)
    scales = torch.randint(least, most, (columns, depth // group), dtype=torch.int8)
    scales[0] = least or most - 1
    factors = (torch.rand(columns, depth // gcd(depth, 256)) * 1e-3).half()
    parts: dict[str, Any] = {"offsets": None}
    if not low:
        offsets = torch.randint(0, 64, scales.shape, dtype=torch.int8)
        parts = {"offsets": offsets, "offset_factors": -(torch.rand(factors.shape) * 1e-2).half()}
    kept = pack_nibbles(codes.view(torch.uint8)) if form in ("q2_k", "q4_k") else codes
    return QuantizedMatrix(codes=kept, scales=scales, factors=factors, **parts)


def product_of(matrix: QuantizedMatrix, **fields: Any) -> tuple[Any, Any]:
    """The operator, and what must outlive it."""
    slices = fields.get("num_slices", 1)
    packed = pack(Codes(matrix), is_gated=False, activations="int8", num_slices=slices)
    given = {"norm": None, "activation": "identity", "accumulates": False, "num_slices": 1, "is_partial": False}
    registers = {"source": 0, "target": 1, "is_gated": False, "bias": None}
    registers |= {"column": 0, "num_columns": matrix.out_features, "limit": 0.0, "slope": 0.0}
    gemm = library.load().structs["Gemm"]
    return new(gemm, matrix=packed.matrix(), **registers, **{**given, **fields}), packed


def quantised(states: Tensor, group: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Codes [rows, groups, group] and scales [rows, groups] of rows."""
    groups = states.numpy().reshape(len(states), -1, group)
    top = np.abs(groups).max(-1)
    factors = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return np.rint(groups * factors[..., None]).astype(np.int64), top / np.float32(127)


def fused(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[np.float32]:
    wide: Any = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float32)


def expected_of(matrix: QuantizedMatrix, states: Tensor) -> NDArray[np.float32]:
    """The product as integer.h describes it, group by group, in numpy."""
    if matrix.block_size is not None:
        return expected_of_blocks(matrix, states)
    group = matrix.group_size
    codes, scales = quantised(states, group)
    weights = matrix.unpacked_codes().numpy().astype(np.int64).reshape(matrix.out_features, -1, group)
    factors = matrix.scales.float().numpy()
    is_centred = matrix.bits == 4 and matrix.scales.dtype == torch.float16
    offsets = None if is_centred or matrix.offsets is None else matrix.offsets.float().numpy()
    sums = np.zeros((len(states), matrix.out_features), np.float32)
    for g in range(weights.shape[1]):
        whole = codes[:, g] @ (weights[:, g] - 8 * is_centred).T
        sums = fused(whole.astype(np.float32), factors[:, g] * scales[:, g, None], sums)
        if offsets is not None:
            shifts = scales[:, g] * codes[:, g].sum(-1).astype(np.float32)
            sums = fused(np.broadcast_to(offsets[:, g], sums.shape), shifts[:, None], sums)
    return sums


def expected_of_blocks(matrix: QuantizedMatrix, states: Tensor) -> NDArray[np.float32]:
    """The product as integer_blocks.h describes it, block by block, in numpy."""
    group, block = matrix.group_size, matrix.block_size
    codes, scales = quantised(states, block)
    shape = (matrix.out_features, -1, block // group)
    weights = matrix.unpacked_codes().numpy().astype(np.int64).reshape(*shape, group)
    small = matrix.scales.numpy().astype(np.int64).reshape(shape)
    factors = matrix.factors.float().numpy()
    sums = np.zeros((len(states), matrix.out_features), np.float32)
    for b in range(weights.shape[1]):
        own = codes[:, b].reshape(len(states), -1, group)
        whole = np.einsum("rgi,cgi,cg->rc", own, weights[:, b], small[:, b])
        sums = fused(whole.astype(np.float32), factors[:, b] * scales[:, b, None], sums)
        if matrix.offsets is not None:
            least = matrix.offsets.numpy().astype(np.int64).reshape(shape)[:, b]
            shifts = np.einsum("rgi,cg->rc", own, least).astype(np.float32)
            sums = fused(shifts, matrix.offset_factors.float().numpy()[:, b] * scales[:, b, None], sums)
    return sums


@pytest.mark.parametrize("form", [*FORMS, *BLOCKS])
@pytest.mark.parametrize(("columns", "depth"), [(1, 32), (33, 96), (70, 4192), (34, 768)])
def test_a_product_is_numpys_to_the_bit_whatever_the_rows(
    native: Any, run: Any, form: str, columns: int, depth: int
) -> None:
    matrix = matrix_of(form, columns, depth)
    product, _held = product_of(matrix)
    states = torch.randn(max(ROWS), depth)
    states[0, :32] = 0.0
    states[1] = 1.0  # the largest codes everywhere
    states[2] *= 1e-3
    whole = run(native, product, states, columns, threads=2)
    assert np.array_equal(whole.numpy(), expected_of(matrix, states))
    for rows in ROWS:
        for first in (0, max(ROWS) - rows):
            some = run(native, product, states[first : first + rows].clone(), columns, threads=1)
            assert torch.equal(some, whole[first : first + rows]), (rows, first)


@pytest.mark.parametrize("form", ["q4_0", "bytes-offsets-16", "q3_k", "q4_k", "q6_k"])
@pytest.mark.parametrize("strange", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so_and_stays_in_its_row(native: Any, run: Any, form: str, strange: float) -> None:
    matrix = matrix_of(form, 40, 96)
    product, _held = product_of(matrix)
    states = torch.randn(8, 96)
    expected = run(native, product, states, 40, threads=1)
    states[3, 50] = strange
    found = run(native, product, states, 40, threads=1)
    assert found[3].isnan().all()
    assert torch.equal(found[[0, 1, 2, 4, 5, 6, 7]], expected[[0, 1, 2, 4, 5, 6, 7]])


def test_what_is_next_to_nothing_counts_as_zero(native: Any, run: Any) -> None:
    product, _held = product_of(matrix_of("q4_1", 40, 96))
    for size in (0.0, 1e-31, 1e-42):
        assert not run(native, product, torch.full((2, 96), size), 40, threads=1).any()


@pytest.mark.parametrize("form", ["q4_0", "bytes-16", *BLOCKS])
@pytest.mark.parametrize("slices", [2, 3, 4])
def test_slices_are_summed_apart_and_added_in_one_tree(native: Any, run: Any, form: str, slices: int) -> None:
    matrix, depth = matrix_of(form, 40, 64 * slices), 64 * slices
    product, _held = product_of(matrix, num_slices=slices)
    states = torch.randn(13, depth)
    parts = []
    for i in range(slices):
        own = slice(64 * i, 64 * (i + 1))
        part, _own = product_of(matrix.columns(own.start, own.stop))
        parts.append(run(native, part, states[:, own].contiguous(), 40, threads=1))
    expected = parts[0] + parts[1]
    if slices > 2:
        expected = expected + (parts[2] if slices == 3 else parts[2] + parts[3])
    assert torch.equal(run(native, product, states, 40, threads=2), expected)
