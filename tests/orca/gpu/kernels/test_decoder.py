"""Whole models on the kernels, against the same models on torch's operators on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from mlsys_core.errors import MemoryPlanError
from mlsys_orca.backends.triton import to_gpu
from mlsys_orca.backends.triton.decoder import FusedAttention, FusedDecoder, FusedMLP, FusedNorm, FusedPreNormLayer
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.decoder import DecoderModel, ForwardInputs
from mlsys_orca.model.families import model_family
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.model.layers import RMSNorm
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VOCAB, BLOCK = 64, 4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "cohere": {"logit_scale": 1.0},  # both branches of a layer side by side
    "qwen3": {"head_dim": 24},  # norms of heads
    "gemma2": {"head_dim": 24, "sliding_window": 3, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 4.0},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
}


class RandomWeights:
    """Stand-in for a checkpoint: every tensor that is asked for, random by its name."""

    def __init__(self, embedding: str) -> None:
        self.checkpoint = SimpleNamespace(layout="huggingface", names=frozenset({f"{embedding}.weight"}))

    def expect(self, name: str, expected: tuple[int, ...]) -> None:
        """Every tensor is there, in the shape that is expected."""

    def read_into(self, name: str, out: Tensor) -> None:
        values = torch.randn(out.shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) * 0.2
        out.copy_(values + 1 if out.ndim == 1 and name.endswith("weight") else values)


def build(name: str, device: torch.device | str = "cpu", dtype: str = "fp32") -> Decoder:
    """A small model of a family with random weights, the same on every device."""
    family = model_family(name)
    config, stems = family.from_huggingface(SHAPE | FAMILIES[name]), family.stems["huggingface"]
    reader: Any = RandomWeights(stems["embedding"])
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "device": torch.device(device), "eps": config.norm_eps}
    with torch.inference_mode():
        model = family.build(config, OperatorReader(reader, stems, **options))
    assert isinstance(model, Decoder)
    return model


def iterations() -> Iterator[IterationBatch]:
    """Three requests whose prefills, chunks and decodes meet; blocks as they come."""
    tokens = {"a": [5, 17], "b": [7, 9], "c": [11, 22, 33, 44, 55, 3]}
    tables = {"a": (7,), "b": (5,), "c": (3, 1)}
    for parts in ({"a": (0, 1), "c": (0, 5)}, {"a": (1, 2), "b": (0, 2), "c": (5, 6)}):
        builder = BatchBuilder()
        for name, (start, stop) in parts.items():
            builder.add(
                name,
                tokens[name][start:stop],
                num_computed_tokens=start,
                block_table=tables[name],
                sampling=SamplingParams(),
            )
        yield builder.build()


def logits_of(model: DecoderModel, rows: Sequence[int] | None = None) -> Tensor:
    """Return the logits of all rows of :func:`iterations`, or of ``rows`` of each."""
    device = model.device
    cache = KVCache(model.config, num_blocks=8, block_size=BLOCK, dtype=model.dtype, device=device)
    logits = []
    with torch.inference_mode():
        for batch in iterations():
            wanted = range(batch.num_tokens) if rows is None else rows
            inputs = ForwardInputs(batch, block_size=BLOCK, device=device, wanted=wanted)
            logits.append(model(inputs, cache).cpu())
    return torch.cat(logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_torchs_operators(name: str, device: torch.device) -> None:
    expected = logits_of(build(name))
    assert expected.std() > 0.3
    assert torch.allclose(logits_of(FusedDecoder(build(name, device))), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter cannot multiply bf16")
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_close(name: str, device: torch.device) -> None:
    expected, rounded = logits_of(build(name)), logits_of(FusedDecoder(build(name, device, "bf16")))
    assert torch.corrcoef(torch.stack((expected.flatten(), rounded.flatten())))[0, 1] > 0.98


def test_every_part_of_a_llama_runs_on_a_kernel(device: torch.device) -> None:
    kinds = [type(module) for module in FusedDecoder(build("llama", device)).modules()]
    assert kinds.count(FusedPreNormLayer) == kinds.count(FusedAttention) == kinds.count(FusedMLP) == 2
    assert kinds.count(FusedNorm) == 5


def test_only_the_rows_that_are_wanted_reach_the_head(device: torch.device) -> None:
    expected = logits_of(build("llama")).split([batch.num_tokens for batch in iterations()])
    model = FusedDecoder(build("llama", device))
    assert torch.allclose(logits_of(model, rows=[2, 0]), torch.cat([logits[[2, 0]] for logits in expected]), atol=1e-4)
    assert logits_of(model, rows=[]).shape == (0, VOCAB)


def test_a_model_with_a_part_that_has_no_kernel_stays_as_it_is(device: torch.device) -> None:
    model = build("qwen3", device)
    model.layers[1].attention.qk_norm = RMSNorm(torch.ones(24), eps=1e-5, dtype=torch.float32)
    assert to_gpu(model) is model
    assert isinstance(to_gpu(build("qwen3", device)), FusedDecoder)


def test_a_table_too_short_is_refused(device: torch.device) -> None:
    model = FusedDecoder(build("llama", device))
    builder = BatchBuilder()
    builder.add("a", [3] * 9, num_computed_tokens=0, block_table=(0, 1), sampling=None)
    cache = KVCache(model.config, num_blocks=2, block_size=BLOCK, dtype=model.dtype, device=device)
    with pytest.raises(MemoryPlanError, match="do not hold 9"):
        model(ForwardInputs(builder.build(), block_size=BLOCK, device=device), cache)
