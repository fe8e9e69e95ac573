"""OLMo 2 (2024): norms behind the branches instead of before them, and over all query heads and all key heads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Attention, WideNorms
from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.config_readers import GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.families import llama
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader

_STEMS: Stems = {
    "gguf": {
        **llama.STEMS["gguf"],
        "q_norm": "blk.{}.attn_q_norm",
        "k_norm": "blk.{}.attn_k_norm",
        "attention_out_norm": "blk.{}.post_attention_norm",
        "mlp_out_norm": "blk.{}.post_ffw_norm",
    },
    "huggingface": {
        **llama.STEMS["huggingface"],
        "q_norm": "model.layers.{}.self_attn.q_norm",
        "k_norm": "model.layers.{}.self_attn.k_norm",
        "attention_out_norm": "model.layers.{}.post_attention_layernorm",
        "mlp_out_norm": "model.layers.{}.post_feedforward_layernorm",
    },
}
for _stems in _STEMS.values():  # what an OLMo 2 has not
    del _stems["attention_norm"], _stems["mlp_norm"]


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    refuse(raw.get("clip_qkv") is not None, "queries, keys and values that are clipped (clip_qkv)")
    return config_from_huggingface({"rms_norm_eps": 1e-5} | dict(raw), "olmo2", spans_heads=True)


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, spans_heads=True)  # a window, OLMo 3's, is refused


def _attention(config: ModelConfig, read: OperatorReader, index: int) -> Attention:
    query, key = (
        read.rms_norm(role, heads * config.head_dim, at=(index,))
        for role, heads in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads))
    )
    return assembly.read_attention(config, read, index, qk_norm=WideNorms(query, key))


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(
        assembly.build, layer=partial(assembly.read_sandwich_layer, attention=_attention, norms_inputs=False)
    ),
)
