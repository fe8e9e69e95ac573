"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and a window in the layers after the first few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlsys_orca.model.assembly import build
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import (
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    windows_from_huggingface,
)
from mlsys_orca.model.families.llama import STEMS
from mlsys_orca.model.family import Family

DEFAULTS = {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}


def windows(raw: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    """Return the windows that a Qwen's ``config.json`` states."""
    width = raw["sliding_window"] if raw.get("use_sliding_window") else None
    return windows_from_huggingface(raw, width, lambda number: number >= raw["max_window_layers"])


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = DEFAULTS | dict(raw)
    return config_from_huggingface(raw, "qwen2", windows=windows(raw), qkv_bias=True, output_bias=False)


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, qkv_bias=True)


FAMILY = Family(from_huggingface=_from_huggingface, from_gguf=_from_gguf, stems=STEMS, build=build)
