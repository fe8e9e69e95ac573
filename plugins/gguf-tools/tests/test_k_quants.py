"""K-quant blocks, decoded by the ``gguf`` library: how far they are from the values, and what no search may spoil."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mlsys_gguf_tools.k_quants import q4_k, q5_k, q6_k
from torch import Tensor

Writer = Callable[[Tensor], Tensor]
KINDS: dict[str, tuple[Writer, GGMLQuantizationType, float]] = {
    # The error of normal values by their spread: llama.cpp's ggml_quantize_chunk has .0714, .0362 and .0178.
    "Q4_K": (q4_k, GGMLQuantizationType.Q4_K, 0.0718),
    "Q5_K": (q5_k, GGMLQuantizationType.Q5_K, 0.0364),
    "Q6_K": (q6_k, GGMLQuantizationType.Q6_K, 0.0179),
}


def decoded(values: np.ndarray, kind: str) -> np.ndarray:
    write, type_, _ = KINDS[kind]
    blocks = write(torch.from_numpy(values)).numpy()
    assert blocks.shape == (len(values), GGML_QUANT_SIZES[type_][1])
    return gguf.quants.dequantize(blocks, type_).reshape(values.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_normal_values_lose_no_more_than_by_llama_cpp(kind: str) -> None:
    values = np.random.default_rng(3).normal(0, 0.05, (400, 256)).astype(np.float32)
    error = np.sqrt(np.square(decoded(values, kind) - values).mean()) / 0.05
    assert 0.9 * KINDS[kind][2] < error < KINDS[kind][2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_blocks_can_hold_exactly_stays_nearly_so(kind: str) -> None:
    """Of multiples of one step none moves by half a step: what is left is a group's scale, which is rounded too."""
    most = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 31}[kind]
    codes = np.tile(np.arange(256) % (most + 1), (3, 1))
    values = (codes * 0.25 - (2.0 if kind != "Q6_K" else 0.0)).astype(np.float32)
    assert np.abs(decoded(values, kind) - values).max() < 0.25 / 2


@pytest.mark.parametrize("kind", KINDS)
@given(
    values=arrays.arrays(np.float32, (2, 256), elements=st.floats(-1e4, 1e4, width=32)),
)
def test_no_value_moves_by_more_than_a_few_steps_of_its_super_block(kind: str, values: np.ndarray) -> None:
    found = decoded(values, kind)
    assert np.isfinite(found).all()
    most = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 32}[kind]
    span = np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(found - values) <= span * (2.5 / most + 2 / 63) + 1e-3).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-30, 1e-3, 1e4])
def test_a_constant_stays_one(kind: str, value: float) -> None:
    """Least squares has no answer there, only rounding errors."""
    found = decoded(np.full((2, 256), value, np.float32), kind)
    assert np.abs(found - value).max() <= max(0.03 * abs(value), 1e-7)
