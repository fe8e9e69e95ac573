import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from mlsys_orca.model.weights.gguf_blocks import GROUPED, quantized_matrix

Q = GGMLQuantizationType
KINDS = {"Q4_0": (4, 32), "Q4_1": (4, 32), "Q5_0": (8, 32), "Q5_1": (8, 32), "Q8_0": (8, 32)}
KINDS |= {"Q2_K": (4, 16), "Q3_K": (8, 16), "Q4_K": (4, 32), "Q5_K": (8, 32), "Q6_K": (8, 16), "MXFP4": (8, 32)}
FACTORS = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}  # others: [0]
FACTORS |= {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "MXFP4": []}


def random_blocks(kind: GGMLQuantizationType, num_blocks: int, seed: int, *, largest: float = 0.01) -> np.ndarray:
    """Every byte at random, but for the fp16 factors, which are finite numbers of either sign, and great exponents."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (num_blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for start in FACTORS.get(kind.name, [0]):
        factors = generator.uniform(-largest, largest, (num_blocks, 1)).astype(np.float16)
        blocks[:, start : start + 2] = factors.view(np.uint8)
    if kind == Q.MXFP4:
        blocks[:, 0] %= 250  # the codes reach 6, and the next exponents fp32's end
    return blocks


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [1, 300])  # one piece; several with a rest
def test_values_are_the_gguf_librarys_to_the_bit(name: str, rows: int) -> None:
    kind, columns = Q[name], 512
    block_len, _ = GGML_QUANT_SIZES[kind]
    blocks = random_blocks(kind, rows * columns // block_len, seed=rows)
    matrix = quantized_matrix(blocks.reshape(-1), kind, columns)
    assert matrix.shape == (rows, columns)
    assert (matrix.bits, matrix.group_size) == KINDS[name]
    assert np.array_equal(matrix.dequantized().numpy(), dequantize(blocks, kind).reshape(rows, columns))


def test_every_type_that_is_read_is_tested() -> None:
    assert {kind.name for kind in GROUPED} == set(KINDS)


BITS = {
    "Q4_0": 5,
    "Q4_1": 5,
    "Q5_0": 8.5,
    "Q5_1": 9,
    "Q8_0": 8.5,
    "Q2_K": 5.125,
    "Q3_K": 8.5625,
    "Q4_K": 4.625,
    "Q5_K": 8.625,
    "Q6_K": 8.5625,
    "MXFP4": 9,
}


@pytest.mark.parametrize(("name", "bits_a_weight"), BITS.items())
def test_scales_take_as_little_memory_as_holds_them_exactly(name: str, bits_a_weight: float) -> None:
    blocks = random_blocks(Q[name], 8, seed=0)
    matrix = quantized_matrix(blocks.reshape(-1), Q[name], 256)
    assert matrix.nbytes * 8 == bits_a_weight * matrix.out_features * 256


def test_offsets_past_the_range_of_fp16_stay_exact() -> None:
    blocks = random_blocks(Q.Q4_0, 64, seed=1, largest=60_000)
    matrix = quantized_matrix(blocks.reshape(-1), Q.Q4_0, 64)
    assert matrix.scales.dtype == torch.float32
    assert np.array_equal(matrix.dequantized().numpy(), dequantize(blocks, Q.Q4_0).reshape(matrix.shape))
