"""Llama and what has its shape (SmolLM, Mistral): RMSNorm, rotary positions, grouped heads, a gated MLP.

Also the base of the families that differ from it in few parts, which take its names, and what reads it,
:mod:`mlsys_orca.model.assembly`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Attention
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import (
    GGUF_EXPERTS,
    GGUF_STEMS,
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    expert_fields,
)
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader

STEMS: Stems = {
    "gguf": GGUF_STEMS | GGUF_EXPERTS,
    "huggingface": {
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "model.layers.{}.input_layernorm",
        "q": "model.layers.{}.self_attn.q_proj",
        "k": "model.layers.{}.self_attn.k_proj",
        "v": "model.layers.{}.self_attn.v_proj",
        "o": "model.layers.{}.self_attn.o_proj",
        "mlp_norm": "model.layers.{}.post_attention_layernorm",
        "gate": "model.layers.{}.mlp.gate_proj",
        "up": "model.layers.{}.mlp.up_proj",
        "down": "model.layers.{}.mlp.down_proj",
    },
}


def _read_attention(config: ModelConfig, read: OperatorReader, index: int) -> Attention:
    if read.layout == "huggingface":
        return assembly.read_attention(config, read, index)
    # GGUF's converter interleaves the two halves of each head of this architecture; take that back.
    return assembly.read_attention_of_pairs(config, read, index)


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, **expert_fields(fields))


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    return config_from_huggingface(raw, "llama")


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=STEMS,
    build=partial(assembly.build, attention=_read_attention),
    pairs_in_gguf=True,
)
