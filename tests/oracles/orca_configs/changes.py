"""Changes of a configuration: every field of transformers' own class at other values, one at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import transformers

from tests.conformance.orca.families import DYNAMIC, LINEAR, LLAMA3, LONGROPE, SHAPE, YARN, Case

_DISTILBERT = {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4}
_MODERNBERT = {"local_attention": 16, "layer_types": None, "cls_token_id": 1, "sep_token_id": 2}
ENCODERS = {
    "bert": Case("Bert", SHAPE),
    "roberta": Case("Roberta", SHAPE | {"pad_token_id": 1}),
    "xlm-roberta": Case("XLMRoberta", SHAPE | {"pad_token_id": 1, "type_vocab_size": 1}),
    "camembert": Case("Camembert", SHAPE | {"pad_token_id": 1}),
    "distilbert": Case("DistilBert", SHAPE | _DISTILBERT),
    "mpnet": Case("MPNet", SHAPE | {"pad_token_id": 1}),
    "modernbert": Case("ModernBert", SHAPE | _MODERNBERT),
    "nomic": Case("NomicBert", SHAPE),
}
ACTIVATIONS = ["gelu", "relu", "silu", "gelu_pytorch_tanh", "gelu_new", "relu2", "quick_gelu", "tanh", "mish"]
ROTARY: list[dict[str, Any]] = [
    *(LINEAR, DYNAMIC, LONGROPE, LLAMA3, LLAMA3 | {"factor": 8.0, "high_freq_factor": 2.0}),
    *(YARN, YARN | {"attention_factor": 1.7}, YARN | {"mscale": 0.7}, YARN | {"mscale_all_dim": 0.7}),
    *({"rope_type": kind, "partial_rotary_factor": 0.5} for kind in ("default", "proportional")),
]
KINDS = ["full_attention", "sliding_attention", "chunked_attention"]
# The tests' tokens and weights, sizes without a context for the prompts, and what no forward reads.
_LEFT_OUT = {
    *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "init_std"),
    *("max_position_embeddings", "max_seq_len", "n_positions", "model_type", "architectures", "transformers_version"),
    *("dtype", "use_cache", "return_dict", "output_hidden_states", "output_attentions", "id2label", "label2id"),
    *("_name_or_path", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder"),
    "alibi_bias_max",  # MPT's: transformers takes 8, whatever the file says; its authors' code, and ours, read it
}
_OF_OTHERS: dict[str, list[Any]] = {  # keys of one family in a file of another: read, refused, or without effect
    "sliding_window": [5],
    "use_sliding_window": [True],
    "attention_bias": [True],
    "mlp_bias": [True],
    "head_dim": [8, 32, 6],
    "tie_word_embeddings": [True, False],
    "num_key_value_heads": [1, 4],
    "attn_logit_softcapping": [3.0],
    "final_logit_softcapping": [3.0],
    "partial_rotary_factor": [0.5],
    "rope_scaling": [{"rope_type": "linear", "factor": 3.0}],
    "clip_qkv": [0.5],
    "scale_attn_by_inverse_layer_idx": [True],
    "qk_layernorm": [True],
    "use_qk_norm": [True],
    "use_bidirectional_attention": [True],
    "is_causal": [False],
    "add_cross_attention": [True],
    "logit_scale": [0.3],
    "embedding_multiplier": [2.0],
    "rotary_dim": [4],
    "sliding_window_pattern": [3],
    "attention_chunk_size": [4],
    "no_rope_layers": [[0, 1]],
    "is_decoder": [True],
    "position_embedding_type": ["relative_key", "rotary"],
}


def changes(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the changes of a case's configuration, none first."""
    yield {}
    fields = getattr(transformers, f"{case.family}Config")(**case.config).to_dict()
    for name, value in fields.items():
        if name == "layer_types" and isinstance(value, list):
            mixed = random.Random(0).choices(KINDS[:2], k=len(value))
            yield from (
                {name: types, "sliding_window": 5} for types in (*([kind] * len(value) for kind in KINDS), mixed)
            )
        else:
            yield from ({name: other} for other in _others(name, value))
    for name, values in _OF_OTHERS.items():
        yield from ({name: value} for value in values if fields.get(name) != value)


def _others(name: str, value: Any) -> list[Any]:
    if name in _LEFT_OUT:
        return []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [each for each in ACTIVATIONS if each != value] if value in ACTIVATIONS else ["something"]
    if isinstance(value, int):
        return sorted({0, 1, 3, value // 2, value + 1, value * 2} - {value})
    if isinstance(value, float):
        return [each for each in (0.0, value / 3, value * 2 + 0.1) if each != value]
    if isinstance(value, list):
        return [each for each in (value[::-1], value[:-1], value + value[-1:]) if each != value]
    if isinstance(value, dict):
        kept = {key: value[key] for key in ("rope_theta", "partial_rotary_factor") if key in value}
        rotary = [kept | each for each in ROTARY] if "rope_theta" in value or "rope_type" in value else []
        return rotary + [value | {key: other} for key, each in value.items() for other in _others(key, each)]
    return [3, 0.3, True, "gelu"] if value is None else []
