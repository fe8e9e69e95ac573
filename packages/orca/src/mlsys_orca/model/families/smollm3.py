"""SmolLM3: Llama, some of whose layers do not turn their heads (NoPE; Kazemnejad et al., 2023): every fourth one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import (
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    windows_from_huggingface,
)
from mlsys_orca.model.families import llama

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
    "no_rope_layer_interval": 4,
    "sliding_window": None,
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    rotated = raw.get("no_rope_layers")  # 1 where positions do turn the heads, whatever its name
    if rotated is None:
        rotated = _rotated(raw["num_hidden_layers"], raw["no_rope_layer_interval"])
    width = raw["sliding_window"] if raw.get("use_sliding_window") else None
    return config_from_huggingface(
        raw,
        "smollm3",
        rotated=tuple(bool(turns) for turns in rotated),
        windows=windows_from_huggingface(raw, width, lambda number: not rotated[number]),
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, rotated=_rotated(fields.get("block_count"), 4))


def _rotated(num_layers: int, interval: int) -> tuple[bool, ...]:
    return tuple((number + 1) % interval != 0 for number in range(num_layers))


FAMILY = replace(llama.FAMILY, from_huggingface=_from_huggingface, from_gguf=_from_gguf)
