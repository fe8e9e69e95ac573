"""Packed weights take as many bytes as the file's own blocks, or little more: exact arithmetic, type by type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from mlsys_orca.backends.native.packing import PackedLinear, Rows, pack
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.weights.gguf_blocks import GROUPED, quantized_matrix
from mlsys_orca.model.weights.quantized import QuantizedMatrix

from tests.orca.loading.test_gguf_blocks import random_blocks

ROWS, COLUMNS = 64, 1024
INT8 = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 8.5,
    "Q5_1": 9,
    "Q8_0": 8.5,
    "Q2_K": 3.125,
    "Q3_K": 3.5625,
    "Q4_K": 4.625,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
    "MXFP4": 9,
}
FLOAT = INT8 | {"Q2_K": 5.125, "Q3_K": 8.5625, "Q5_K": 8.625, "Q6_K": 8.5625}  # codes are widened to 4 bits, or bytes


def matrix_of(name: str) -> QuantizedMatrix:
    kind = GGMLQuantizationType[name]
    blocks = random_blocks(kind, ROWS * COLUMNS // GGML_QUANT_SIZES[kind][0], seed=1)
    return quantized_matrix(blocks.reshape(-1), kind, COLUMNS)


def packed_as(matrix: QuantizedMatrix, **options: Any) -> PackedLinear:
    return pack(Linear(matrix), is_gated=False, **options)


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("name", [kind.name for kind in GROUPED])
def test_bits_of_a_packed_weight(name: str, activations: Rows) -> None:
    expected = (INT8 if activations == "int8" else FLOAT)[name]
    packed = packed_as(matrix_of(name), activations=activations)
    assert packed.nbytes * 8 == expected * ROWS * COLUMNS
    if activations == "int8" and name in ("Q4_0", "Q4_1", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        block_len, block_nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        assert expected <= 1.04 * 8 * block_nbytes / block_len, "as the file has them"


@pytest.mark.parametrize(("slices", "blocks"), [(1, 4), (4, 4), (8, 8), (16, 16)])
def test_blocks_are_as_large_as_slices_allow(slices: int, blocks: int) -> None:
    packed = packed_as(matrix_of("Q4_K"), activations="int8", num_slices=slices)
    assert packed.kind == "int4_quads"
    assert packed.factors is not None
    assert packed.factors.shape[1] == blocks


def test_codes_that_no_kernel_of_blocks_takes_lose_their_factors() -> None:
    matrix = matrix_of("Q6_K")
    wide = QuantizedMatrix(codes=matrix.codes * 3, scales=matrix.scales, offsets=None, factors=matrix.factors)
    packed = packed_as(wide, activations="int8")
    assert packed.kind == "int8_quads"
    assert packed.factors is None
    assert packed.scales is not None
    assert packed.scales.dtype == torch.float32
