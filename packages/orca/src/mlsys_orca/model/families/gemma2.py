"""Gemma 2 (Riviere et al., 2024): norms around each branch, soft caps on scores and logits, every other layer a window.

Hugging Face directories have the norms' weights less one; GGUF files as they multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig, activation_name
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

STEMS: Stems = {
    "gguf": {
        **llama.STEMS["gguf"],
        "attention_out_norm": "blk.{}.post_attention_norm",
        "mlp_out_norm": "blk.{}.post_ffw_norm",
    },
    "huggingface": {
        **llama.STEMS["huggingface"],
        "attention_out_norm": "model.layers.{}.post_attention_layernorm",
        "mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
        "mlp_out_norm": "model.layers.{}.post_feedforward_layernorm",
    },
}
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_LAYERS_OF_27B = 46  # whose scores are scaled by hidden_size / num_heads, which GGUF does not say


def _slides(number: int) -> bool:
    return number % 2 == 0


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    return config_from_huggingface(
        raw,
        "gemma2",
        activation=activation_name(raw["hidden_activation"]),
        windows=windows_from_huggingface(raw, raw["sliding_window"], _slides),
        attention_scale=raw["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=raw["attn_logit_softcapping"],
        logit_softcap=raw["final_logit_softcapping"],
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    num_layers, window = fields.get("block_count"), fields.get("attention.sliding_window", 4096)
    scaled_by_width = fields.get("embedding_length") / fields.get("attention.head_count")
    return config_from_gguf(
        fields,
        activation="gelu_tanh",
        windows=tuple(window if window and _slides(number) else None for number in range(num_layers)),
        attention_scale=scaled_by_width**-0.5 if num_layers == _LAYERS_OF_27B else None,
        attention_softcap=fields.get("attn_logit_softcapping", 50.0) or None,
        logit_softcap=fields.get("final_logit_softcapping", 30.0) or None,
    )


def one_plus_norm(read: OperatorReader, role: str, size: int, *, at: tuple[int, ...] = ()) -> nn.Module:
    """Read a norm whose weight directories have less one, and GGUF files as it multiplies."""
    return read.rms_norm(role, size, at=at, one_plus=read.layout == "huggingface")


def embedding_scale(config: ModelConfig, read: OperatorReader) -> float:
    """Return what multiplies the embeddings: the root of the width, rounded as the models were trained."""
    return torch.tensor(config.hidden_size**0.5).to(read.dtype).item()


def build(config: ModelConfig, read: OperatorReader, **parts: Any) -> Decoder:
    """Build a decoder of Gemma 2's shape.

    Args:
        config: The model's shape.
        read: Reads its tensors.
        parts: Further arguments of :func:`~mlsys_orca.model.assembly.read_sandwich_layer`, and ``rotary``.
    """
    rotary = parts.pop("rotary", None)
    config = replace(config, embedding_scale=embedding_scale(config, read))
    layer = partial(assembly.read_sandwich_layer, norm=one_plus_norm, **parts)
    return assembly.build(config, read, norm=one_plus_norm, layer=layer, rotary=rotary)


FAMILY = Family(from_huggingface=_from_huggingface, from_gguf=_from_gguf, stems=STEMS, build=build)
