"""Files of large models, at a size for tests: every kind is read, runs, and is quantised throughout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mlsys_bench.orca.peers.gguf import decode_rate, requests
from mlsys_bench.orca.peers.large import KINDS, SHAPES, type_of, write
from mlsys_bench.orca.weights import log_probabilities
from mlsys_bench.workload.results import LoadResult, RequestRecord
from mlsys_orca.backends.native.decoder import NativeDecoder
from mlsys_orca.backends.native.packing import Rows
from mlsys_orca.backends.native.plan import Gemm
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.weights.gguf_file import GgufFile
from mlsys_orca.model.weights.quantized import QuantizedMatrix


@pytest.mark.parametrize(("shape", "kind"), [*(("tiny", kind) for kind in KINDS), ("granite-tiny", "q4_k_m")])
def test_a_written_file_runs(tmp_path: Path, shape: str, kind: str) -> None:
    path = tmp_path / "model.gguf"
    assert write(SHAPES[shape], kind, path) > 2 * 32000 * 256
    loaded = load_model(path, dtype="fp32", backend="native", activations="int8")
    assert isinstance(loaded.model, NativeDecoder)
    assert loaded.model.num_integer_products == len(loaded.model.linears)
    ids = loaded.tokenizer.encode("ab cde f gh")
    found = log_probabilities(loaded.model, ids)
    assert found.isfinite().all()
    assert found.std() > 0.1
    assert torch.equal(found[:, :257], found[:, :1].expand(-1, 257)), "silent tokens have equal logits"


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("kind", ["q4_0", "q4_k_m"])
def test_a_loaded_model_is_as_small_as_its_file(tmp_path: Path, kind: str, activations: Rows) -> None:
    """Types that one layer mixes stay as they are: each of its products has its own kernel."""
    path = tmp_path / "model.gguf"
    write(SHAPES["tiny"], kind, path)
    model = load_model(path, dtype="bf16", backend="native", activations=activations).model
    assert isinstance(model, NativeDecoder)
    assert isinstance(model.embedding.table, QuantizedMatrix)
    in_file = sum(GgufFile(path).nbytes(name) for name in GgufFile(path).names)
    # Half of so small a model is the table (Q4_0 with offsets: 5 bits), the rest the head (Q6_K, in floats as bytes).
    most = 1.05 if activations == "int8" else 1.23
    assert model.nbytes + model.embedding.table.nbytes <= most * in_file
    mixed = [each for each in model.plan.operators if isinstance(each, Gemm) and each.column]
    assert len(mixed) == (1 if kind == "q4_k_m" else 0)


def test_q4_k_m_gives_more_bits_to_some_layers() -> None:
    kinds = [type_of("ffn_down", layer, 32, "q4_k_m") for layer in range(32)]
    assert kinds.count("Q6_K") == 16
    assert type_of("ffn_gate", 0, 32, "q4_k_m") == "Q4_K"


def test_decoding_is_timed_from_when_all_have_begun() -> None:
    times = [(1.0, 1.5, 2.0, 3.0), (2.0, 2.5, 4.0)]
    records = tuple(
        RequestRecord(
            index=i,
            scheduled_s=0.0,
            sent_s=0.0,
            done_s=4.0,
            token_s=token_s,
            num_input_tokens=5,
            num_output_tokens=len(token_s),
            num_planned_tokens=len(token_s),
        )
        for i, token_s in enumerate(times)
    )
    assert decode_rate(LoadResult(name="a", records=records, num_planned=2, max_connections=2)) == 3 / 2


def test_rounds_share_no_prompt() -> None:
    prompts = [prompt for seed in range(3) for prompt in requests(2, 16, 4, seed=seed).prompts]
    assert len(set(prompts)) == 6
