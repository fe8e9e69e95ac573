"""Qwen3 with a mixture of experts in every layer (Qwen3-30B-A3B and larger)."""

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
    expert_fields,
    require,
)
from mlsys_orca.model.experts import refuse_dense_layers
from mlsys_orca.model.families import qwen2, qwen3
from mlsys_orca.model.family import Family, Stems

_STEMS: Stems = {
    "gguf": qwen3.STEMS["gguf"],
    "huggingface": {
        **qwen3.STEMS["huggingface"],
        "router": "model.layers.{}.mlp.gate",
        "gate": "model.layers.{}.mlp.experts.{}.gate_proj",
        "up": "model.layers.{}.mlp.experts.{}.up_proj",
        "down": "model.layers.{}.mlp.experts.{}.down_proj",
    },
}
_DEFAULTS = qwen3.DEFAULTS | {
    "head_dim": None,  # unlike Qwen3's
    "moe_intermediate_size": 768,
    "num_local_experts": 128,  # or num_experts
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    raw |= {"num_local_experts": raw.get("num_experts", raw["num_local_experts"])}
    require(raw, "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
    refuse_dense_layers(raw)
    return config_from_huggingface(
        raw,
        "qwen3_moe",
        windows=qwen2.windows(raw),
        intermediate_size=raw["moe_intermediate_size"],
        num_experts=raw["num_local_experts"],
        num_chosen_experts=raw["num_experts_per_tok"],
        experts_sum_to_one=bool(raw.get("norm_topk_prob", False)),
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    inner = fields.get("expert_feed_forward_length")
    return config_from_gguf(fields, intermediate_size=inner, **expert_fields(fields))


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, attention=qwen3.read_attention),
)
