"""Whole models from GGUF files whose weights are K-quants: random blocks, checked against the library's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from mlsys_orca.loading.load import load_model
from torch import Tensor

from tests.orca.conftest import write_gguf
from tests.orca.forwards import logits_of

Q = GGMLQuantizationType
WIDTH, VOCAB = 256, 260  # K-quants come in blocks of 256 values


def random_blocks(shape: tuple[int, int], kind: GGMLQuantizationType, seed: int) -> np.ndarray:
    block_len, block_nbytes = GGML_QUANT_SIZES[kind]
    # Bytes below 40 make scales below one, whichever of a block's bytes are its scales.
    rows, columns = shape[0], shape[1] // block_len * block_nbytes
    return np.random.default_rng(seed).integers(0, 40, (rows, columns), dtype=np.uint8)


def logits(path: Path, **options: Any) -> Tensor:
    return torch.cat(logits_of(load_model(path, dtype="fp32", **options).model, [[5, 9, 200], [7]]))


@pytest.mark.parametrize("kinds", [(Q.Q4_K, Q.Q6_K), (Q.Q5_K, Q.Q3_K), (Q.Q2_K, Q.Q8_0), (Q.Q5_0, Q.Q5_1)])
def test_a_mixed_k_quant_file_computes_as_its_dequantised_values(
    tmp_path: Path, metadata: dict[str, Any], kinds: tuple[GGMLQuantizationType, GGMLQuantizationType]
) -> None:
    metadata |= {"llama.embedding_length": WIDTH, "llama.feed_forward_length": WIDTH, "llama.block_count": 1}
    shapes = {"token_embd.weight": (VOCAB, WIDTH), "blk.0.attn_q.weight": (WIDTH, WIDTH)}
    shapes |= {f"blk.0.attn_{role}.weight": (WIDTH // 2, WIDTH) for role in ("k", "v")}
    shapes |= {f"blk.0.{role}.weight": (WIDTH, WIDTH) for role in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    packed: dict[str, tuple[np.ndarray, Any]] = {}
    plain: dict[str, tuple[np.ndarray, Any]] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        kind = kinds[seed % 2]  # the mixes that llama.cpp calls Q4_K_M and so on have several in one file
        blocks = random_blocks(shape, kind, seed)
        packed[name] = (blocks, kind)
        plain[name] = (gguf.quants.dequantize(blocks, kind), Q.F32)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        packed[name] = plain[name] = (np.linspace(0.5, 1.5, WIDTH, dtype=np.float32), Q.F32)
    expected = logits(write_gguf(tmp_path / "plain.gguf", metadata, plain), backend="torch")
    assert expected.isfinite().all()
    assert expected.std() > 0
    path = write_gguf(tmp_path / "packed.gguf", metadata, packed)
    assert torch.equal(logits(path, backend="torch"), expected)
    for backend in ("auto", "torch"):  # products of other sizes add in another order
        assert torch.allclose(
            logits(path, weights="packed", backend=backend), expected, rtol=1e-4, atol=1e-4 * expected.std()
        )
