"""Gemma 1 (Mesnard et al., 2024): Llama with heads of any width, GeLU and embeddings scaled by the root of the width.

Hugging Face directories have the norms' weights less one; GGUF files as they multiply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig, activation_name
from mlsys_orca.model.config_readers import GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.families import llama
from mlsys_orca.model.families.gemma2 import embedding_scale, one_plus_norm
from mlsys_orca.model.family import Family
from mlsys_orca.model.operator_reader import OperatorReader

_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    name = raw.get("hidden_activation") or raw["hidden_act"]
    if name == "gelu":  # as the first files say, of models that were trained with the other
        name = "gelu_pytorch_tanh"
    return config_from_huggingface(raw, "gemma", activation=activation_name(name))


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, activation="gelu_tanh")


def _build(config: ModelConfig, read: OperatorReader) -> Decoder:
    return assembly.build(replace(config, embedding_scale=embedding_scale(config, read)), read, norm=one_plus_norm)


FAMILY = Family(from_huggingface=_from_huggingface, from_gguf=_from_gguf, stems=llama.STEMS, build=_build)
