"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, biases everywhere, an MLP without a gate.

Hugging Face directories have its weights as [in_features, out_features]; GGUF files as everyone else's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig, activation_name, refuse
from mlsys_orca.model.config_readers import GGUF_STEMS, GgufFields, config_from_gguf, refuse_common, require
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader

_STEMS: Stems = {
    "gguf": GGUF_STEMS,
    "huggingface": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "attention_norm": "transformer.h.{}.ln_1",
        "qkv": "transformer.h.{}.attn.c_attn",
        "o": "transformer.h.{}.attn.c_proj",
        "mlp_norm": "transformer.h.{}.ln_2",
        "up": "transformer.h.{}.mlp.c_fc",
        "down": "transformer.h.{}.mlp.c_proj",
    },
}
_BIASED: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    refuse(bool(raw.get("scale_attn_by_inverse_layer_idx")), "attention scaled by the layer's number")
    require(raw, "n_embd", "n_layer", "n_head", "vocab_size")
    refuse_common(raw)
    hidden, heads = raw["n_embd"], raw["n_head"]
    return ModelConfig(
        architecture="gpt2",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw.get("n_inner") or 4 * hidden,
        num_layers=raw["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=raw.get("n_positions", 1024),
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        activation=activation_name(raw.get("activation_function", "gelu_new")),
        tied_embeddings=bool(raw.get("tie_word_embeddings", True)),
        attention_scale=None if raw.get("scale_attn_weights", True) else 1.0,
        **_BIASED,
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, norm="layer", activation="gelu_tanh", **_BIASED)


def _build(config: ModelConfig, read: OperatorReader) -> Decoder:
    transposed = read.layout in FAMILY.transposed
    return assembly.build(
        config,
        read,
        attention=partial(assembly.read_joined_attention, transposed=transposed),
        mlp=partial(assembly.read_plain_mlp, transposed=transposed),
        norm=OperatorReader.layer_norm,
        positions=read.tensor("positions", (config.max_positions, config.hidden_size)),
    )


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=_build,
    ignorable_suffixes=(".attn.bias", ".attn.masked_bias"),  # causal masks that old files store
    transposed=frozenset({"huggingface"}),
)
