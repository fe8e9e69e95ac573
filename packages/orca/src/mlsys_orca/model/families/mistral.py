"""Mistral: Llama with a window that every layer's attention slides (Jiang et al., 2023). In GGUF it is a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import config_from_huggingface, windows_from_huggingface
from mlsys_orca.model.families import llama

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    windows = windows_from_huggingface(raw, raw["sliding_window"], lambda _: True)
    return config_from_huggingface(raw, "mistral", windows=windows)


FAMILY = replace(llama.FAMILY, from_huggingface=_from_huggingface)
