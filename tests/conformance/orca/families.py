"""Small random checkpoints of every family, as transformers writes them, and what compares two models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.weights.quantize import quantize
from torch import Tensor

from tests.orca.forwards import logits_of

VOCAB = 256
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
GEMMA2: dict[str, Any] = SHAPE | {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 6.0,
}

GEMMA3: dict[str, Any] = SHAPE | {
    "num_hidden_layers": 7,  # the sixth sees everything
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
}
YARN: dict[str, Any] = {  # most of the answers are beyond the original context
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1 + i / 10 for i in range(8)],
    "long_factor": [1 + i / 2 for i in range(8)],
}
SMALL = SHAPE | {"num_hidden_layers": 2}
HALF: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6, "logits_scaling": 0.5}
MAMBA2: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 20,
    "n_groups": 2,
    "chunk_size": 8,
    "initializer_range": 0.3,
}
MAMBA_PART: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 20, "mamba_chunk_size": 8}
GRANITE_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 56}
QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "head_dim": 16,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
QWEN3_5: dict[str, Any] = {
    key: value for key, value in QWEN3_NEXT.items() if "expert" not in key and "moe" not in key
} | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
COHERE2 = {"logit_scale": 2.0, "sliding_window": 9, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
FULL = ["full_attention", "sliding_attention"]
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7} | {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
    | {"original_max_position_embeddings": 32}
}
DEEPSEEK = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20} | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
GROUPS = {"q_lora_rank": 32, "n_group": 4, "topk_group": 2}
MSCALE = {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.6, "beta_fast": 32, "beta_slow": 1}}
ONE_SCALE = {
    "rope_parameters": MSCALE["rope_parameters"] | {"mscale": 0.6}
}  # as the models have it, and a GGUF says it


@dataclass(frozen=True)
class Case:
    """One checkpoint: the family's classes in transformers, and its configuration."""

    family: str
    config: dict[str, Any]


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
    "gemma3": Case("Gemma3Text", GEMMA3),
    "gemma3-scaled": Case(
        "Gemma3Text",
        GEMMA3
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "qwen3-moe": Case(
        "Qwen3Moe",
        SHAPE
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        | {"head_dim": 32},
    ),
    "qwen2-moe": Case(
        "Qwen2Moe",
        SHAPE
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "use_sliding_window": False}
        | {"shared_expert_intermediate_size": 80, "tie_word_embeddings": True},
    ),
    "smollm3": Case("SmolLM3", SHAPE | {"num_hidden_layers": 4}),
    "smollm3-window": Case(
        "SmolLM3", SHAPE | {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 9}
    ),
    "llama-yarn": Case("Llama", SHAPE | {"rope_parameters": YARN}),
    "qwen2-yarn-by-hand": Case(
        "Qwen2",
        SHAPE
        | {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    ),
    "llama-dynamic": Case("Llama", SHAPE | {"rope_parameters": DYNAMIC}),
    "phi3-longrope-short": Case(
        "Phi3", SHAPE | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 128}}
    ),
    "mistral-window": Case("Mistral", SHAPE | {"sliding_window": 11}),
    "llama": Case("Llama", SHAPE),
    "llama-multi-head": Case("Llama", SHAPE | {"num_key_value_heads": 4}),
    "llama-one-kv-head": Case("Llama", SHAPE | {"num_key_value_heads": 1}),
    "llama-wide-heads": Case("Llama", SHAPE | {"head_dim": 32}),
    "llama-biases": Case("Llama", SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": Case("Llama", SHAPE | {"hidden_act": "gelu"}),
    "llama-tied": Case("Llama", SHAPE | {"tie_word_embeddings": True}),
    "llama-theta": Case("Llama", SHAPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama-linear": Case("Llama", SHAPE | {"rope_parameters": LINEAR}),
    "llama-llama3": Case("Llama", SHAPE | {"rope_parameters": LLAMA3}),
    "gemma": Case("Gemma", SMALL | {"head_dim": 32}),
    "granite": Case("Granite", SMALL | GRANITE),
    "granite-tied": Case(
        "Granite", SMALL | GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "olmo2": Case("Olmo2", SMALL | {"rope_parameters": LLAMA3}),
    "olmo2-biased": Case("Olmo2", SMALL | {"attention_bias": True, "num_key_value_heads": 4}),
    "cohere": Case("Cohere", SMALL | {"logit_scale": 2.0, "rope_parameters": LINEAR}),
    "cohere-norms": Case("Cohere", SMALL | {"logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": Case("Cohere2", SMALL | COHERE2),
    "glm": Case("Glm", SMALL | {"head_dim": 32}),
    "glm4": Case("Glm4", SMALL | {"head_dim": 16}),
    "qwen2-moe-sums-to-one": Case("Qwen2Moe", SMALL | EXPERTS | {"shared_expert_intermediate_size": 80}),
    "qwen3-moe-of-all": Case("Qwen3Moe", SMALL | EXPERTS | {"norm_topk_prob": False, "head_dim": 16}),
    "gpt-oss": Case("GptOss", SMALL | GPT_OSS),
    "gpt-oss-other-limits": Case(
        "GptOss", SMALL | GPT_OSS | {"swiglu_limit": 0.5, "swiglu_alpha": 1.2, "layer_types": FULL}
    ),
    "deepseek-v2": Case("DeepseekV2", SMALL | DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-v2-groups": Case(
        "DeepseekV2", SMALL | DEEPSEEK | MSCALE | GROUPS | {"topk_method": "group_limited_greedy", "rms_norm_eps": 1e-5}
    ),
    "deepseek-v3": Case("DeepseekV3", SMALL | DEEPSEEK | ONE_SCALE | GROUPS | {"num_hidden_layers": 3}),
    "mamba2": Case("Mamba2", TOKENS | MAMBA2),
    "mamba2-tied": Case("Mamba2", TOKENS | MAMBA2 | {"n_groups": 1, "conv_kernel": 3, "tie_word_embeddings": True}),
    "granite-hybrid": Case(
        "GraniteMoeHybrid",
        SMALL | MAMBA_PART | GRANITE | GRANITE_EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "granite-hybrid-dense": Case(
        "GraniteMoeHybrid",
        SMALL
        | MAMBA_PART
        | GRANITE
        | {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 0}
        | {"shared_intermediate_size": 56},
    ),
    "granite-hybrid-rotary": Case(
        "GraniteMoeHybrid",
        SMALL | MAMBA_PART | {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    ),
    "qwen3-next": Case("Qwen3Next", SMALL | QWEN3_NEXT),
    "qwen3-5": Case("Qwen3_5Text", SMALL | QWEN3_5),
    "qwen3-5-moe": Case(
        "Qwen3_5MoeText", {key: value for key, value in (SMALL | QWEN3_NEXT).items() if key != "intermediate_size"}
    ),
}
# Cases with a layout in GGUF of their own, and its architecture.
GGUF = {
    "llama": "LLAMA",
    "llama-tied": "LLAMA",
    "llama-llama3": "LLAMA",
    "llama-yarn": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "gpt2": "GPT2",
    "phi3": "PHI3",
    "phi3-partial": "PHI3",
    "mixtral": "LLAMA",
    "gemma2": "GEMMA2",
    "gemma3": "GEMMA3",
    "qwen3-moe": "QWEN3MOE",
    "smollm3": "SMOLLM3",
    "gemma": "GEMMA",
    "granite": "GRANITE",
    "olmo2": "OLMO2",
    "cohere-norms": "COMMAND_R",
    "cohere2": "COHERE2",
    "glm4": "GLM4",
    "gpt-oss": "GPT_OSS",
    "deepseek-v3": "DEEPSEEK2",
    "mamba2": "MAMBA2",
    "mamba2-tied": "MAMBA2",
    "granite-hybrid": "GRANITE_HYBRID",
    "granite-hybrid-dense": "GRANITE_HYBRID",
    "qwen3-next": "QWEN3NEXT",
    "qwen3-5": "QWEN35",
    "qwen3-5-moe": "QWEN35MOE",
}


def write_checkpoint(path: Path, case: Case, *, auto: str = "AutoModelForCausalLM") -> Any:
    """A directory as transformers saves one, nothing left at a value that would hide a mistake; returns the model."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{case.family}Config")(**case.config)
    config._attn_implementation = "eager"  # the others leave soft caps out
    model: Any = getattr(transformers, auto).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms are ones and biases zeros otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.2)
    model.save_pretrained(path)
    vocab = {f"t{token_id}": token_id for token_id in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "t0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 2
    return model


def log_probabilities(loaded: LoadedModel, sequences: list[list[int]]) -> list[Tensor]:
    """Return log-probabilities of each sequence's next tokens, all run as one ragged batch."""
    return [logits.log_softmax(-1) for logits in logits_of(loaded.model, sequences)]


AT_LEAST_8_BITS = (
    "embed_",
    "word_embeddings",
    "wte",
    "lm_head",
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv",
    "query_key_value",
    "c_attn",
)


def round_weights(model: Any, weights: str) -> None:
    """Give every matrix of a product the values that ours has when it is loaded with ``weights``."""
    for name, parameter in model.named_parameters():
        floating = ("wpe", "embed_positions", "mlp.gate.weight", "shared_expert_gate")
        is_kept = parameter.ndim == 1 or any(part in name for part in floating)
        if is_kept:
            continue
        is_transposed = "transformer" in name and ".c_" in name
        matrix = (parameter.T if is_transposed else parameter.flatten(0, -2)).contiguous()
        quantized = quantize(
            matrix,
            bits=8 if weights == "int8" or any(part in name for part in AT_LEAST_8_BITS) else 4,
            group_size=32 if matrix.shape[1] % 32 == 0 else 16,
        )
        values = quantized.dequantized()
        parameter.copy_(values.T if is_transposed else values.view_as(parameter))
