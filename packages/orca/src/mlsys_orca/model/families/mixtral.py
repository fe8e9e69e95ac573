"""Mixtral (Jiang et al., 2024): Llama with a mixture of experts in every layer. In GGUF it is a Llama with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import config_from_huggingface, require, windows_from_huggingface
from mlsys_orca.model.families import llama

_STEMS = {
    **llama.STEMS,
    "huggingface": {
        **llama.STEMS["huggingface"],
        "router": "model.layers.{}.block_sparse_moe.gate",
        "gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
    },
}
_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    require(raw, "num_local_experts", "num_experts_per_tok")
    return config_from_huggingface(
        raw,
        "mixtral",
        windows=windows_from_huggingface(raw, raw["sliding_window"], lambda _: True),
        num_experts=raw["num_local_experts"],
        num_chosen_experts=raw["num_experts_per_tok"],
    )


FAMILY = replace(llama.FAMILY, from_huggingface=_from_huggingface, stems=_STEMS)
