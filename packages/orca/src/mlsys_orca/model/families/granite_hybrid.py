"""Granite 4 (IBM, 2025): Bamba's layers with Granite's multipliers, and experts beside an MLP that all tokens pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model import assembly, recurrent
from mlsys_orca.model.blocks import GatedMLP
from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.config_readers import GgufFields, config_from_gguf, config_from_huggingface, require
from mlsys_orca.model.experts import (
    GGUF_EXPERTS,
    MixtureOfExperts,
    SharedExpert,
    choice_of,
    expert_fields,
    read_experts,
    read_gated,
    shared_size,
)
from mlsys_orca.model.families import bamba, granite, mamba2
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import OperatorReader
from torch import nn

_STEMS: Stems = {
    "huggingface": {
        **{role: stem for role, stem in bamba.STEMS.items() if role not in ("gate", "up", "down")},
        "router": "model.layers.{}.block_sparse_moe.router.layer",
        "products": "model.layers.{}.block_sparse_moe.input_linear",
        "downs": "model.layers.{}.block_sparse_moe.output_linear",
        "shared.product": "model.layers.{}.shared_mlp.input_linear",
        "shared.down": "model.layers.{}.shared_mlp.output_linear",
    },
    "gguf": {
        **mamba2.STEMS["gguf"],
        **GGUF_EXPERTS,
        "shared.gate": "blk.{}.ffn_gate_shexp",
        "shared.up": "blk.{}.ffn_up_shexp",
        "shared.down": "blk.{}.ffn_down_shexp",
    },
}
_DEFAULTS: dict[str, Any] = bamba.DEFAULTS | {
    "rms_norm_eps": 1e-6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "intermediate_size": 11008,
}
_RECURRENT, _ATTENDING = ("linear_attention", "mamba"), ("full_attention", "attention")


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    require(raw, "num_hidden_layers", "num_local_experts", "num_experts_per_tok", "shared_intermediate_size")
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * raw["num_hidden_layers"]
    if not raw["num_local_experts"]:
        raw |= {"intermediate_size": raw["shared_intermediate_size"]}  # the only MLP
    unknown = set(kinds) - {*_RECURRENT, *_ATTENDING}
    refuse(bool(unknown), f"layers of type {', '.join(map(repr, sorted(unknown)))} (mamba and attention are)")
    positions = raw.get("position_embedding_type")
    refuse(positions not in (None, "nope", "rope"), f"positions of type {positions!r} (rope and none are)")
    config = config_from_huggingface(
        raw,
        "granitemoehybrid",
        attention_scale=raw.get("attention_multiplier", 1.0),
        rotated=None if positions == "rope" else (False,) * raw["num_hidden_layers"],
        recurrent=bamba.recurrent_part(raw, [kind in _RECURRENT for kind in kinds]),
        num_experts=raw["num_local_experts"],
        num_chosen_experts=raw["num_experts_per_tok"] if raw["num_local_experts"] else 0,
        shared_expert_size=raw["shared_intermediate_size"],
        spans_heads=True,
    )
    return granite.scaled(
        config,
        embedding=raw.get("embedding_multiplier", 1.0),
        branch=raw.get("residual_multiplier", 1.0),
        logits=raw.get("logits_scaling", 1.0),
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    prefix = f"{fields.architecture}."
    key = prefix + "attention.head_count_kv"
    counts = fields.metadata.get(key)  # by layer, 0 where one is recurrent
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise InvalidInputError(f"{key} is {str(counts)[:50]}; it is a list that says which layers attend")
    refuse(len({*counts} - {0}) > 1, f"layers that attend with different {key}")
    # Bamba's, which turns a part of each head; the writer of these files orders its rows as if all of it turned.
    refuse(bool(fields.get("rope.scaling.finetuned", True)), f"{prefix}rope.scaling.finetuned, rotary positions")
    one = {**fields.metadata, key: max(counts, default=0) or fields.get("attention.head_count")}
    num_experts, numbers = fields.get("expert_count", 0), granite.numbers_of_file(fields)
    config = config_from_gguf(
        replace(fields, metadata=one),
        rotated=(False,) * len(counts),
        attention_scale=fields.get("attention.scale", 0.0) or None,
        recurrent=recurrent.part_from_gguf(fields, [count == 0 for count in counts]),
        shared_expert_size=shared_size(fields, None if num_experts else fields.get("feed_forward_length")),
        spans_heads=True,
        **expert_fields(fields),
    )
    return granite.scaled(config, **numbers)


def _mlp(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    hidden, inner, at, count = config.hidden_size, config.intermediate_size, (index,), config.num_experts
    size = config.shared_expert_size
    assert size is not None
    if read.layout == "gguf":
        if not count:
            return assembly.read_mlp(replace(config, intermediate_size=size), read, index)
        return SharedExpert(read_experts(config, read, index), read_gated(config, read, index, "shared", size))
    shared = GatedMLP(
        read.linear({"shared.product": 2 * size}, hidden, at=at),
        read.linear({"shared.down": hidden}, size, at=at),
        activation=config.activation,
    )
    if not count:
        return shared
    products = read.stack("products", count, 2 * inner, hidden, at=at)
    downs = read.stack("downs", count, hidden, inner, at=at)
    experts = (
        GatedMLP(Linear(product), Linear(down), activation=config.activation)
        for product, down in zip(products, downs, strict=True)
    )
    router = read.linear({"router": count}, hidden, at=at)
    return SharedExpert(MixtureOfExperts(router, experts, choice=choice_of(config)), shared)


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, attention=bamba.read_branch, mlp=_mlp),
)
