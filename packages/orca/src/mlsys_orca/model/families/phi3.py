"""Phi-3 and Phi-4: Llama with query, key and value in one matrix, gate and up in another, and a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import GatedMLP
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import (
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    windows_from_huggingface,
)
from mlsys_orca.model.families import llama
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader
from torch import nn

_STEMS: Stems = {
    "gguf": llama.STEMS["gguf"] | {"gate_up": "blk.{}.ffn_up"},
    "huggingface": {
        **llama.STEMS["huggingface"],
        "qkv": "model.layers.{}.self_attn.qkv_proj",
        "gate_up": "model.layers.{}.mlp.gate_up_proj",
    },
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None} | dict(raw)
    windows = windows_from_huggingface(raw, raw["sliding_window"], lambda _: True)
    return config_from_huggingface(raw, "phi3", partial_rotary=True, windows=windows)


def _from_gguf(fields: GgufFields) -> ModelConfig:
    window = fields.get("attention.sliding_window")  # 0: none; files that do not say are too old to tell
    return config_from_gguf(
        fields,
        partial_rotary=True,
        windows=(window,) * fields.get("block_count") if window else None,
    )


def read_mlp(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    """Read the MLP of layer ``index``, gate and up from one matrix."""
    hidden, inner, at = config.hidden_size, config.intermediate_size, (index,)
    return GatedMLP(
        read.linear({"gate_up": 2 * inner}, hidden, at=at),
        read.linear({"down": hidden}, inner, at=at),
        activation=config.activation,
    )


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, attention=assembly.read_joined_attention, mlp=read_mlp),
)
