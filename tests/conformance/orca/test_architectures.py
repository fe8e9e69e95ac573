"""Every family against transformers: small random checkpoints, the same tokens and log-probabilities in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from mlsys_orca.batch import BatchBuilder, SamplingParams
from mlsys_orca.kv_cache import KVCache
from mlsys_orca.loading.load import load_model
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.runner import Runner
from torch import Tensor

Greedy = Callable[..., list[list[int]]]

VOCAB, NUM_TOKENS = 256, 64
LENGTHS = [1, 20, 3, 33, 5, 2, 17, 9, 40, 4, 12, 26, 7, 1, 31, 15]
JOINS = [0, 0, 3, 3, 4, 8, 8, 13, 20, 21, 30, 30, 31, 44, 45, 60]
PROMPTS = [[(7 * i + 3 * j * j + 11) % VOCAB for j in range(length)] for i, length in enumerate(LENGTHS)]
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHAPE: dict[str, Any] = TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
GPT2: dict[str, Any] = TOKENS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
OPT: dict[str, Any] = SHAPE | {"ffn_dim": 112, "init_std": 0.2}
GEMMA2: dict[str, Any] = SHAPE | {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint: the family's classes in transformers, and its configuration."""

    family: str
    config: dict[str, Any]
    keeps_tokens_apart: float = 0.5  # what the logits deviate by at least: enough for greedy choices to mean something
    load: dict[str, Any] = field(default_factory=dict)


CASES = {
    "qwen2": Case("Qwen2", SHAPE),
    "qwen2-tied-window": Case(
        "Qwen2",
        SHAPE | {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "gpt2": Case("GPT2", GPT2),
    "gpt2-untied": Case(
        "GPT2",
        GPT2
        | {"n_inner": 96, "activation_function": "relu", "scale_attn_weights": False, "tie_word_embeddings": False},
    ),
    "qwen3": Case("Qwen3", SHAPE | {"head_dim": 32}),
    "qwen3-biases": Case("Qwen3", SHAPE | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt-neox": Case("GPTNeoX", SHAPE),
    "gpt-neox-sequential": Case(
        "GPTNeoX",
        SHAPE
        | {"use_parallel_residual": False, "attention_bias": False}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    ),
    "opt": Case("OPT", OPT),
    "opt-post-norm": Case("OPT", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-bare": Case(
        "OPT",
        OPT
        | {"enable_bias": False, "layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True}
        | {"activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "phi3": Case("Phi3", SHAPE | {"sliding_window": 10}),
    "phi3-partial": Case(
        "Phi3",
        SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}},
    ),
    "mixtral": Case("Mixtral", SHAPE | {"num_local_experts": 5}),
    "mixtral-one-expert": Case(
        "Mixtral", SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 12}
    ),
    "gemma2": Case("Gemma2", GEMMA2),
    "gemma2-uncapped": Case(
        "Gemma2",
        GEMMA2
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False}
        | {"layer_types": ["full_attention", "full_attention", "sliding_attention"]},
    ),
    "mistral-window": Case("Mistral", SHAPE | {"sliding_window": 11}),
}


def write_checkpoint(path: Path, case: Case) -> Any:
    """A directory as transformers saves one, nothing left at a value that would hide a mistake; returns the model."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{case.family}Config")(**case.config)
    config._attn_implementation = "eager"  # the others leave soft caps out
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms are ones and biases zeros otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(path)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 2
    return model


def log_probabilities(loaded: LoadedModel, sequences: list[list[int]]) -> list[Tensor]:
    """Of every next token of each sequence, all of them run as one ragged batch."""
    cache = KVCache(loaded.config, num_blocks=16 * len(sequences), block_size=8, dtype=torch.float32)
    builder = BatchBuilder()
    for i, sequence in enumerate(sequences):
        table = tuple(range(16 * i, 16 * i + 16))
        builder.add(str(i), sequence, num_computed_tokens=0, block_table=table, sampling=SamplingParams())
    with torch.inference_mode():
        inputs = Runner(loaded.model, cache)._inputs(builder.build())
        everywhere = replace(inputs, sampled_rows=torch.arange(len(inputs.token_ids)))
        logits = loaded.model(everywhere, cache)
    return list(logits.log_softmax(-1).split([len(sequence) for sequence in sequences]))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(
    tmp_path: Path, name: str, greedy_by_orca: Greedy, greedy_by_transformers: Greedy
) -> None:
    case = CASES[name]
    reference = write_checkpoint(tmp_path, case)
    loaded = load_model(tmp_path, dtype="fp32")
    loaded.tokenizer.eos_ids = frozenset()  # the reference does not stop either

    expected = greedy_by_transformers(reference, PROMPTS, NUM_TOKENS, pad_id=2)
    assert greedy_by_orca(loaded, PROMPTS, NUM_TOKENS, joins=JOINS) == expected
    assert [greedy_by_orca(loaded, [prompt], NUM_TOKENS)[0] for prompt in PROMPTS] == expected

    sequences = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
    for sequence, ours in zip(sequences, log_probabilities(loaded, sequences), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([sequence])).logits[0]
        assert logits.std() > case.keeps_tokens_apart
        assert torch.allclose(ours, logits.log_softmax(-1), atol=1e-4, rtol=0)
