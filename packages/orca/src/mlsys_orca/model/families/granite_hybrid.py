"""Granite 4 (IBM, 2025): Mamba-2's recurrent layers between some that attend, with Granite's multipliers.

An MLP that all tokens pass stands beside experts, or alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model import assembly, recurrent
from mlsys_orca.model.blocks import GatedMLP
from mlsys_orca.model.config import ModelConfig, RecurrentPart, refuse
from mlsys_orca.model.config_readers import (
    GGUF_EXPERTS,
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    expert_fields,
    require,
)
from mlsys_orca.model.experts import MixtureOfExperts, SharedExpert, choice_of, read_experts, read_gated, shared_size
from mlsys_orca.model.families import granite, llama, mamba2
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import OperatorReader
from torch import nn

_MIXER = ("in", "taps", "decay", "step_bias", "skip", "gate_norm", "out")
_STEMS: Stems = {
    "huggingface": {
        **{role: stem for role, stem in llama.STEMS["huggingface"].items() if role not in ("gate", "up", "down")},
        **{
            role: mamba2.STEMS["huggingface"][role].replace("backbone.layers.{}.mixer", "model.layers.{}.mamba")
            for role in _MIXER
        },
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
_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
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
        recurrent=_recurrent_part(raw, [kind in _RECURRENT for kind in kinds]),
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


def _recurrent_part(raw: Mapping[str, Any], layers: Sequence[bool]) -> RecurrentPart:
    require(raw, "hidden_size", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand")
    recurrent.check_steps(raw)
    refuse(bool(raw["mamba_proj_bias"]), "products of recurrent layers with biases (mamba_proj_bias)")
    refuse(not raw["mamba_conv_bias"], "a convolution without a bias (mamba_conv_bias)")
    heads, inner = raw["mamba_n_heads"], raw["mamba_expand"] * raw["hidden_size"]
    size = inner // max(1, heads) if raw["mamba_d_head"] == "auto" else raw["mamba_d_head"]
    if heads * size != inner:
        raise InvalidInputError(f"{heads} recurrent heads of {size} features are not mamba_expand * hidden_size")
    return RecurrentPart(
        rule="decay",
        layers=tuple(layers),
        num_heads=heads,
        num_groups=raw["mamba_n_groups"],
        head_dim=size,
        state_size=raw["mamba_d_state"],
        num_taps=raw["mamba_d_conv"],
        norm_eps=raw["rms_norm_eps"],
    )


def _branch(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    """Read the recurrent part of layer ``index``, or its attention."""
    part = config.recurrent
    assert part is not None
    if part.layers[index]:
        return recurrent.read_mixer(config, read, index)
    attention = assembly.read_attention(config, read, index)
    attention.index = part.kv_index(index)
    return attention


def _from_gguf(fields: GgufFields) -> ModelConfig:
    prefix = f"{fields.architecture}."
    key = prefix + "attention.head_count_kv"
    counts = fields.metadata.get(key)  # by layer, 0 where one is recurrent
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise InvalidInputError(f"{key} is {str(counts)[:50]}; it is a list that says which layers attend")
    refuse(len({*counts} - {0}) > 1, f"layers that attend with different {key}")
    # Of models that turn a part of each head; the writer of these files orders its rows as if all of it turned.
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
    build=partial(assembly.build, attention=_branch, mlp=_mlp),
)
