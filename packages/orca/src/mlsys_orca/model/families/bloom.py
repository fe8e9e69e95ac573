"""BLOOM (Le Scao et al., 2022): biases by distance instead of positions, normalised embeddings, biases everywhere.

Hugging Face directories have query, key and value of each head beside each other; GGUF files all queries first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mlsys_orca.model import assembly
from mlsys_orca.model.attention import halving_slopes
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.config_readers import GGUF_STEMS, GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.families.gpt_neox import read_attention
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader

_STEMS: Stems = {
    "gguf": GGUF_STEMS,
    "huggingface": {
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "attention_norm": "transformer.h.{}.input_layernorm",
        "qkv": "transformer.h.{}.self_attention.query_key_value",
        "o": "transformer.h.{}.self_attention.dense",
        "mlp_norm": "transformer.h.{}.post_attention_layernorm",
        "up": "transformer.h.{}.mlp.dense_h_to_4h",
        "down": "transformer.h.{}.mlp.dense_4h_to_h",
    },
}
_BIASED: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    after = "apply_residual_connection_post_layernorm"
    refuse(bool(raw.get(after)), f"sums that begin with the normalised state ({after})")
    hidden, heads = raw.get("hidden_size") or raw.get("n_embed"), raw.get("n_head") or raw.get("num_attention_heads")
    named = {
        "hidden_size": hidden,
        "intermediate_size": 4 * (hidden or 0),
        "num_hidden_layers": raw.get("n_layer") or raw.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": None,
        "max_position_embeddings": raw.get("seq_length", 2048),
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
    }
    return config_from_huggingface(
        dict(raw) | named,
        "bloom",
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        alibi_slopes=halving_slopes(heads or 1),
        **_BIASED,
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    slopes = halving_slopes(fields.get("attention.head_count"))
    return config_from_gguf(fields, norm="layer", activation="gelu_tanh", alibi_slopes=slopes, **_BIASED)


def _build(config: ModelConfig, read: OperatorReader) -> Decoder:
    return assembly.build(
        config,
        read,
        attention=read_attention,
        mlp=assembly.read_plain_mlp,
        norm=OperatorReader.layer_norm,
        embedding_norm=read.layer_norm("embedding_norm", config.hidden_size, dtype=torch.float32),
    )


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=_build,
    qkv_by_head=frozenset({"huggingface"}),
)
