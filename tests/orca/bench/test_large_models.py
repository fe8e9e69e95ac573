"""Files of large Llamas, at a size for tests: every kind is read, runs, and is quantised throughout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mlsys_bench.orca.peers.large import KINDS, SHAPES, type_of, write
from mlsys_bench.orca.weights import log_probabilities
from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.loading.load import load_model


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_file_runs(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    assert write(SHAPES["tiny"], kind, path) > 2 * 32000 * 256
    loaded = load_model(path, dtype="fp32", backend="native", activations="int8")
    assert isinstance(loaded.model, NativeDecoder)
    assert loaded.model.num_integer_products == len(loaded.model.linears)
    ids = loaded.tokenizer.encode("ab cde f gh")
    found = log_probabilities(loaded.model, ids)
    assert found.isfinite().all()
    assert found.std() > 0.1
    assert torch.equal(found[:, :257], found[:, :1].expand(-1, 257)), "silent tokens have equal logits"


def test_q4_k_m_gives_more_bits_to_some_layers() -> None:
    kinds = [type_of("ffn_down", layer, 32, "q4_k_m") for layer in range(32)]
    assert kinds.count("Q6_K") == 16
    assert type_of("ffn_gate", 0, 32, "q4_k_m") == "Q4_K"
