"""Qwen3-Next (2025): gated delta nets in most layers, attention with gates in the others, experts in all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly, recurrent
from mlsys_orca.model.config import ModelConfig, RecurrentPart, refuse
from mlsys_orca.model.config_readers import (
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    expert_fields,
    require,
)
from mlsys_orca.model.experts import refuse_dense_layers, shared_size
from mlsys_orca.model.families import qwen2_moe, qwen3
from mlsys_orca.model.families.gemma2 import one_plus_norm
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader
from torch import nn

_STEMS: Stems = {
    "huggingface": {
        **qwen2_moe.FAMILY.stems["huggingface"],
        "qkvz": "model.layers.{}.linear_attn.in_proj_qkvz",
        "ba": "model.layers.{}.linear_attn.in_proj_ba",
        "taps": "model.layers.{}.linear_attn.conv1d",
        "decay": "model.layers.{}.linear_attn.A_log",
        "step_bias": "model.layers.{}.linear_attn.dt_bias",
        "gate_norm": "model.layers.{}.linear_attn.norm",
        "out": "model.layers.{}.linear_attn.out_proj",
    },
    "gguf": {
        **qwen2_moe.FAMILY.stems["gguf"],
        "mlp_norm": "blk.{}.post_attention_norm",
        "z": "blk.{}.attn_gate",
        "ba": "blk.{}.ssm_ba",
        **recurrent.GGUF_STEMS,
    },
}
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    return config_of(DEFAULTS | dict(raw), "qwen3_next")


def config_of(raw: Mapping[str, Any], architecture: str, *, has_experts: bool = True) -> ModelConfig:
    """Return the configuration that a ``config.json`` with Qwen3-Next's keys states, all of which it has."""
    require(raw, "num_hidden_layers", "linear_num_key_heads", "linear_num_value_heads", "full_attention_interval")
    refuse_dense_layers(raw)
    refuse(bool(raw.get("attention_bias")), "attention with biases (attention_bias)")
    recurrent.check_steps(raw)
    kinds = raw.get("layer_types")
    if kinds is None:
        every = raw["full_attention_interval"]
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(raw["num_hidden_layers"])]
    unknown = set(kinds) - {"full_attention", "linear_attention"}
    refuse(bool(unknown), f"layers of type {', '.join(map(repr, sorted(unknown)))} (full and linear attention are)")
    part = RecurrentPart(
        rule="delta",
        layers=tuple(kind == "linear_attention" for kind in kinds),
        num_heads=raw["linear_num_value_heads"],
        num_groups=raw["linear_num_key_heads"],
        head_dim=raw["linear_value_head_dim"],
        state_size=raw["linear_key_head_dim"],
        num_taps=raw["linear_conv_kernel_dim"],
        norm_eps=raw["rms_norm_eps"],
    )
    experts: dict[str, Any] = {}
    if has_experts:
        require(raw, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        experts = {
            "intermediate_size": raw["moe_intermediate_size"],
            "num_experts": raw["num_experts"],
            "num_chosen_experts": raw["num_experts_per_tok"],
            "experts_sum_to_one": bool(raw["norm_topk_prob"]),
            "shared_expert_size": raw["shared_expert_intermediate_size"],
        }
    return config_from_huggingface(
        {"intermediate_size": 1, **raw}, architecture, partial_rotary=True, recurrent=part, spans_heads=True, **experts
    )


def config_of_file(fields: GgufFields, *, num_layers: int | None = None) -> ModelConfig:
    """Return the configuration that a GGUF states, with experts or without.

    Args:
        fields: The metadata.
        num_layers: Layers but those that guess further tokens; None: all.
    """
    every, num_layers = fields.get("full_attention_interval", 4), num_layers or int(fields.get("block_count"))
    experts: dict[str, Any] = expert_fields(fields)
    if experts:
        experts |= {
            "intermediate_size": fields.get("expert_feed_forward_length"),
            "shared_expert_size": shared_size(fields),
        }
    layers = [bool((index + 1) % every) for index in range(num_layers)]
    return config_from_gguf(
        fields,
        partial_rotary=True,
        num_layers=num_layers,
        recurrent=recurrent.part_from_gguf(fields, layers, rule="delta"),
        spans_heads=True,
        **experts,
    )


def read_branch(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    """Read the gated delta net of layer ``index``, or its attention."""
    part = config.recurrent
    assert part is not None
    if part.layers[index]:
        return recurrent.read_delta_net(config, read, index)
    return qwen3.read_gated_attention(config, read, index, kv_index=part.kv_index(index))


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=config_of_file,
    stems=_STEMS,
    build=partial(
        assembly.build,
        attention=read_branch,
        mlp=qwen2_moe.read_shared_experts,
        norm=one_plus_norm,
    ),
    ignorable_prefixes=("mtp.",),  # what guesses further tokens
)
