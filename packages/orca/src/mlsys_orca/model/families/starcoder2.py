"""StarCoder 2 (Lozhkov et al., 2024): LayerNorm, biases everywhere, an MLP without a gate, and a sliding window.

GGUF files do not say the window; what llama.cpp makes of them has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
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

_STEMS: Stems = {
    "gguf": llama.STEMS["gguf"],
    "huggingface": {
        **llama.STEMS["huggingface"],
        "up": "model.layers.{}.mlp.c_fc",
        "down": "model.layers.{}.mlp.c_proj",
    },
}
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_bias": True,
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    biased = bool(raw["use_bias"])
    return config_from_huggingface(
        raw,
        "starcoder2",
        norm_eps=raw["norm_epsilon"],
        windows=windows_from_huggingface(raw, raw["sliding_window"], lambda _: True),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, norm="layer", activation="gelu_tanh")


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, mlp=assembly.read_plain_mlp, norm=OperatorReader.layer_norm),
)
