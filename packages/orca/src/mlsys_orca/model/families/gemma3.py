"""Gemma 3 (2025), the text part: Gemma 2 with normalised heads instead of soft caps, and two rotary bases.

Five of six layers see a window and turn by a small base; the sixth sees everything, and turns by a large one that may
be stretched. Of directories that also hold what sees pictures, :mod:`mlsys_orca.loading.text_part` gives the text part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsys_orca.model.blocks import Decoder, RotatedBy
from mlsys_orca.model.config import ModelConfig, activation_name, refuse
from mlsys_orca.model.config_readers import (
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    windows_from_huggingface,
)
from mlsys_orca.model.families import gemma2, qwen3
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.layers import Rotaries, Rotary
from mlsys_orca.model.operator_reader import OperatorReader

_STEMS: Stems = {layout: qwen3.STEMS[layout] | stems for layout, stems in gemma2.STEMS.items()}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
}
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6  # every sixth layer sees everything
_LAYERS_OF_27B = 62  # whose scores are scaled by hidden_size / num_heads, which GGUF does not say


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | {key: value for key, value in raw.items() if value is not None}
    by_type = raw.get("rope_parameters") or {}  # transformers 5; before, the keys beside it
    local = by_type.get("sliding_attention") or {"rope_theta": raw.get("rope_local_base_freq")}
    refuse(local.get("rope_type", "default") != "default", "rotary scaling in the layers that have a window")
    everywhere = by_type.get("full_attention") or raw.get("rope_scaling") or {}
    return config_from_huggingface(
        {"rope_theta": _THETA} | raw | {"rope_parameters": everywhere},
        "gemma3",
        activation=activation_name(raw["hidden_activation"]),
        windows=windows_from_huggingface(
            raw, raw["sliding_window"], lambda number: (number + 1) % raw["sliding_window_pattern"] != 0
        ),
        local_rope_theta=local.get("rope_theta") or _LOCAL_THETA,
        attention_scale=raw["query_pre_attn_scalar"] ** -0.5,
        logit_softcap=raw["final_logit_softcapping"],
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    num_layers, window = fields.get("block_count"), fields.get("attention.sliding_window")
    pattern = fields.get("attention.sliding_window_pattern", _PATTERN)
    scaled_by_width = fields.get("embedding_length") / fields.get("attention.head_count")
    return config_from_gguf(
        fields,
        activation="gelu_tanh",
        windows=tuple(window if (number + 1) % pattern else None for number in range(num_layers)),
        local_rope_theta=fields.get("rope.freq_base_swa", _LOCAL_THETA),
        attention_scale=scaled_by_width**-0.5 if num_layers == _LAYERS_OF_27B else None,
        logit_softcap=fields.get("final_logit_softcapping", 0) or None,
    )


def _attention(config: ModelConfig, read: OperatorReader, index: int) -> RotatedBy:
    has_window = config.windows is not None and config.windows[index] is not None
    attention = qwen3.read_attention(config, read, index, one_plus=read.layout == "huggingface")
    return RotatedBy(attention, int(has_window))


def _build(config: ModelConfig, read: OperatorReader) -> Decoder:
    theta = config.local_rope_theta or config.rope_theta
    local = replace(config, rope_theta=theta, rope_divisors=None, rope_amplitude=1.0)
    return gemma2.build(
        config,
        read,
        attention=_attention,
        rotary=Rotaries(Rotary(shape, device=read.device) for shape in (config, local)),
    )


FAMILY = Family(from_huggingface=_from_huggingface, from_gguf=_from_gguf, stems=_STEMS, build=_build)
