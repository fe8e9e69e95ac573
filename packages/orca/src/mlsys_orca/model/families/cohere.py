"""Cohere's Command R, and Cohere 2 (Command R7B, Command A): parallel branches behind one LayerNorm without a bias.

Rotary pairs stand beside each other in all files. Cohere may normalise each query and key head; Cohere 2 has a window
in three of four layers, and no positions in the fourth.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Attention
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import (
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    windows_from_huggingface,
)
from mlsys_orca.model.families import llama
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.layers import LayerNorm, halves_of_pairs
from mlsys_orca.model.operator_reader import OperatorReader

_STEMS: Stems = {
    "gguf": {**llama.STEMS["gguf"], "q_norms": "blk.{}.attn_q_norm", "k_norms": "blk.{}.attn_k_norm"},
    "huggingface": {
        **llama.STEMS["huggingface"],
        "q_norms": "model.layers.{}.self_attn.q_norm",
        "k_norms": "model.layers.{}.self_attn.k_norm",
    },
}
_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 500_000.0}
_PATTERN = 4  # every fourth layer of Cohere 2 sees everything


def _shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "norm_eps": raw.get("layer_norm_eps", 1e-5),
        "parallel_residual": True,
        "mlp_bias": False,
        "logit_scale": raw.get("logit_scale", 0.0625),
    }


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    norm = bool(raw.get("use_qk_norm", False))
    return config_from_huggingface(_DEFAULTS | dict(raw), "cohere", qk_norm=norm, **_shared(raw))


def _from_huggingface_2(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | {"rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_pattern": _PATTERN} | dict(raw)
    windows = windows_from_huggingface(
        raw, raw["sliding_window"], lambda number: (number + 1) % raw["sliding_window_pattern"] != 0
    )
    rotated = tuple(window is not None for window in windows or (None,) * raw["num_hidden_layers"])
    return config_from_huggingface(raw, "cohere2", windows=windows, rotated=rotated, **_shared(raw))


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(
        fields,
        norm="layer",
        parallel_residual=True,
        logit_scale=fields.get("logit_scale") or 1.0,
        qk_norm="blk.0.attn_q_norm.weight" in fields.tensor_names,
    )


def _from_gguf_2(fields: GgufFields) -> ModelConfig:
    window = fields.get("attention.sliding_window")
    windows = tuple(window if (number + 1) % _PATTERN else None for number in range(fields.get("block_count")))
    return config_from_gguf(
        fields,
        norm="layer",
        parallel_residual=True,
        logit_scale=fields.get("logit_scale") or 1.0,
        windows=windows,
        rotated=tuple(window is not None for window in windows),
    )


def _attention(config: ModelConfig, read: OperatorReader, index: int) -> Attention:
    norm = None
    if config.qk_norm:
        sizes = {"q_norms": config.num_heads, "k_norms": config.num_kv_heads}
        weights = torch.cat(
            [
                read.tensor(role, (heads, config.head_dim), at=(index,), dtype=torch.float32)
                for role, heads in sizes.items()
            ]
        )
        weights = halves_of_pairs(weights.flatten(), head_dim=config.head_dim).view_as(weights)
        norm = LayerNorm(weights, None, eps=config.norm_eps, dtype=read.dtype)
    return assembly.read_attention_of_pairs(config, read, index, qk_norm=norm)


_build = partial(assembly.build, attention=_attention, norm=partial(OperatorReader.layer_norm, bias=False))
FAMILY = Family(from_huggingface=_from_huggingface, from_gguf=_from_gguf, stems=_STEMS, build=_build)
COHERE2 = Family(from_huggingface=_from_huggingface_2, from_gguf=_from_gguf_2, stems=_STEMS, build=_build)
