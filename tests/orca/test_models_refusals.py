"""Options of each family's configuration that are not implemented are refused by name, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.loading.load import load_model
from mlsys_orca.model.config_readers import GgufFields
from mlsys_orca.model.families import model_family

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
}
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 260}
LONG = {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}


@pytest.mark.parametrize(
    ("architecture", "raw", "message"),
    [
        ("gpt2", SHAPE, "lacks n_embd, n_layer, n_head"),
        ("gpt2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scaled by the layer's number"),
        ("gpt2", GPT2 | {"add_cross_attention": True}, "over an encoder's states"),
        ("gpt2", GPT2 | {"activation_function": "mish"}, "activation 'mish'"),
        ("llama", SHAPE | {"rope_scaling": {"type": "xpos", "factor": 2.0}}, "scaling 'xpos'"),
        ("glm", SHAPE | {"partial_rotary_factor": 0.2}, "rotary part of a head is 25"),
        ("phi3", SHAPE | {"rope_parameters": LONG}, "scaling 'longrope' needs 8 factors"),
        ("phi3", SHAPE | {"rope_scaling": {"type": "su"}}, "scaling 'su'"),
        ("qwen3", SHAPE | {"layer_types": ["linear_attention"] * 2}, "type 'linear_attention'"),
        ("qwen3_moe", SHAPE | {"norm_topk_prob": True, "mlp_only_layers": [0]}, "without experts"),
        ("qwen3_moe", SHAPE | {"norm_topk_prob": True, "decoder_sparse_step": 2}, "without experts"),
        ("smollm3", SHAPE | {"no_rope_layers": [1]}, "2 layers have positions or none, not 1"),
        (
            "gemma3",
            SHAPE | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "in the layers that have a window",
        ),
        ("mixtral", SHAPE | {"num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
        ("mixtral", SHAPE | {"num_local_experts": "all"}, "lacks num_local_experts"),
        ("gemma2", SHAPE | {"use_bidirectional_attention": True}, "later tokens"),
        ("gemma2", SHAPE | {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        ("gemma2", SHAPE | {"hidden_activation": "quick_gelu"}, "activation 'quick_gelu'"),
        ("gemma", SHAPE | {"use_bidirectional_attention": True}, "later tokens"),
        ("granite", SHAPE | {"residual_multiplier": -1.0}, "the residual multiplier -1.0"),
        ("granite", SHAPE | {"partial_rotary_factor": 0.5}, "rotary positions on part of a head"),
        ("olmo2", SHAPE | {"clip_qkv": 8.0}, "clipped"),
        ("cohere", SHAPE | {"logit_scale": 0.0}, "logit_scale is 0.0"),
        ("cohere2", SHAPE | {"layer_types": ["chunked_attention"] * 2}, "type 'chunked_attention'"),
        ("glm4", SHAPE | {"quantization_config": {"bits": 4}}, "quantised by other tools"),
        ("gpt2", GPT2 | {"n_embd": 60}, "head dimension is 15; only even ones"),
    ],
)
def test_a_configuration_is_refused_by_the_family_that_lacks_it(
    architecture: str, raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        model_family(architecture).from_huggingface(raw)


def test_a_directory_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    raw = SHAPE | {"model_type": "qwen2", "quantization_config": {"bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InvalidInputError, match="quantised by other tools"):
        load_model(tmp_path)


def test_neutral_values_are_not_refused() -> None:
    read = model_family("gpt2").from_huggingface
    config = read(GPT2 | {"scale_attn_by_inverse_layer_idx": False, "quantization_config": None})
    assert (config.intermediate_size, config.activation, config.tied_embeddings) == (256, "gelu_tanh", True)


KEYS = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.sliding_window": 0,
    "vocab_size": 260,
}


def gguf_config(architecture: str, changes: dict[str, Any], *, names: frozenset[str] = frozenset()) -> Any:
    metadata = {f"{architecture}.{key}": value for key, value in (KEYS | changes).items() if value is not None}
    read = model_family(architecture).from_gguf
    assert read is not None
    return read(GgufFields(metadata=metadata, architecture=architecture, tensor_names=names))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen2", {"expert_count": 4}, "qwen2.expert_count = 4"),
        ("qwen2", {"attention.sliding_window": 16}, "qwen2.attention.sliding_window = 16"),
        ("qwen3", {"attention.causal": False}, "qwen3.attention.causal = False"),
        ("qwen3", {"rope.scaling.type": "longrope"}, "scaling 'longrope'"),
        ("gpt2", {"attention.layer_norm_epsilon": None}, "lacks gpt2.attention.layer_norm_epsilon"),
        ("gpt2", {"attention.max_alibi_bias": 8.0}, "max_alibi_bias = 8.0"),
        ("phi3", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor = 0.5"),
        ("phi3", {"attention.sliding_window": None}, "lacks phi3.attention.sliding_window"),
        ("gemma2", {"attention.scale": 0.1}, "gemma2.attention.scale = 0.1"),
        ("gemma2", {"attention.value_length": 8}, "values of another width"),
    ],
)
def test_a_gguf_key_that_changes_the_result_is_refused(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    gguf_config(architecture, {})
    with pytest.raises(InvalidInputError, match=message):
        gguf_config(architecture, changes)


def test_the_largest_gemmas_scale_their_scores_by_their_width() -> None:
    assert gguf_config("gemma2", {"attention.key_length": 32}).attention_scale is None
    assert gguf_config("gemma2", {"block_count": 46, "attention.key_length": 32}).attention_scale == 16**-0.5
    gemma3 = {"attention.key_length": 32, "attention.sliding_window": 8}
    assert gguf_config("gemma3", gemma3).attention_scale is None
    assert gguf_config("gemma3", gemma3 | {"block_count": 62}).attention_scale == 16**-0.5


def test_a_model_without_a_gguf_layout_is_refused(make_gguf: Any) -> None:
    with pytest.raises(InvalidInputError, match="'glm', which is read from Hugging Face directories only"):
        load_model(make_gguf(architecture="glm"))
