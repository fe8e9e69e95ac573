"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, beside one that all tokens pass, each by as much as its gate says.

The weights of the chosen experts are those of a softmax over all, so that they do not sum to one unless the file says
so (``norm_topk_prob``).
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
    expert_fields,
    require,
)
from mlsys_orca.model.experts import Choice, SharedExpert, read_experts, read_gated, refuse_dense_layers, shared_size
from mlsys_orca.model.families import qwen2, qwen3_moe
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import OperatorReader
from torch import nn

_STEMS: Stems = {
    "gguf": {
        **qwen3_moe.FAMILY.stems["gguf"],
        "shared.router": "blk.{}.ffn_gate_inp_shexp",
        "shared.gate": "blk.{}.ffn_gate_shexp",
        "shared.up": "blk.{}.ffn_up_shexp",
        "shared.down": "blk.{}.ffn_down_shexp",
    },
    "huggingface": {
        **qwen3_moe.FAMILY.stems["huggingface"],
        "shared.router": "model.layers.{}.mlp.shared_expert_gate",
        "shared.gate": "model.layers.{}.mlp.shared_expert.gate_proj",
        "shared.up": "model.layers.{}.mlp.shared_expert.up_proj",
        "shared.down": "model.layers.{}.mlp.shared_expert.down_proj",
    },
}
_DEFAULTS: dict[str, Any] = qwen2.DEFAULTS | {
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    require(raw, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    refuse_dense_layers(raw)
    return config_from_huggingface(
        raw,
        "qwen2_moe",
        windows=qwen2.windows(raw),
        qkv_bias=bool(raw.get("qkv_bias", True)),
        output_bias=False,
        intermediate_size=raw["moe_intermediate_size"],
        num_experts=raw["num_experts"],
        num_chosen_experts=raw["num_experts_per_tok"],
        experts_sum_to_one=bool(raw.get("norm_topk_prob", False)),
        shared_expert_size=raw["shared_expert_intermediate_size"],
        spans_heads=True,  # ranks share features by one size
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(
        fields,
        intermediate_size=fields.get("expert_feed_forward_length"),
        shared_expert_size=shared_size(fields),
        spans_heads=True,
        experts_sum_to_one=False,
        **expert_fields(fields),
    )


def read_shared_experts(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    """Read the experts of layer ``index``, and the one beside them."""
    hidden, at = config.hidden_size, (index,)
    if read.layout == "gguf":  # which has one row as a vector
        router = Linear(read.tensor("shared.router", (hidden,), at=at).view(1, hidden), None)
    else:
        router = read.linear({"shared.router": 1}, hidden, at=at)
    shared = read_gated(config, read, index, "shared", config.shared_expert_size)
    choice = Choice(num_chosen=config.num_chosen_experts, scoring="softmax", sums_to_one=config.experts_sum_to_one)
    return SharedExpert(read_experts(config, read, index, choice=choice), shared, router)


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, mlp=read_shared_experts),
)
