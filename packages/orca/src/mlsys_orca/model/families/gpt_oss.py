"""gpt-oss (OpenAI, 2025): experts with clamped gates, a sink in each head's softmax, a window in every other layer.

Directories have each layer's experts as one tensor, gates and factors of a feature beside each other: in bf16 with the
features that go in first, in MXFP4 with them last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Attention, GatedMLP, Limits
from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.config_readers import (
    GGUF_EXPERTS,
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    expert_fields,
    require,
    windows_from_huggingface,
    yarn_from_gguf,
)
from mlsys_orca.model.experts import Choice, MixtureOfExperts
from mlsys_orca.model.families import llama
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.weights.quantized import Matrix, concatenate_rows
from torch import Tensor, nn

_LIMIT, _SLOPE = 7.0, 1.702  # where a file says nothing of them, as no GGUF does
_STEMS: Stems = {
    "gguf": {
        **llama.STEMS["gguf"],
        **GGUF_EXPERTS,
        "mlp_norm": "blk.{}.post_attention_norm",
        "sinks": "blk.{}.attn_sinks",
    },
    "huggingface": {
        **{role: stem for role, stem in llama.STEMS["huggingface"].items() if ".mlp." not in stem},
        "sinks": "model.layers.{}.self_attn.sinks",
        "router": "model.layers.{}.mlp.router",
        "gate_ups": "model.layers.{}.mlp.experts.gate_up_proj",
        "gate_up_biases": "model.layers.{}.mlp.experts.gate_up_proj_bias",
        "downs": "model.layers.{}.mlp.experts.down_proj",
        "down_biases": "model.layers.{}.mlp.experts.down_proj_bias",
    },
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = {"num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5} | dict(raw)
    raw.setdefault("head_dim", 64)
    require(raw, "num_local_experts", "num_experts_per_tok")
    refuse(raw.get("hidden_act", "silu") != "silu", f"gates by {raw.get('hidden_act')!r} (silu are)")
    return config_from_huggingface(
        raw,
        "gpt_oss",
        windows=windows_from_huggingface(raw, raw["sliding_window"], lambda layer: layer % 2 == 0),
        num_experts=raw["num_local_experts"],
        num_chosen_experts=raw["num_experts_per_tok"],
        gate_limit=raw.get("swiglu_limit", _LIMIT),
        gate_slope=raw.get("swiglu_alpha", _SLOPE),
        spans_heads=True,  # experts' biases are not divided
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    layers, window = fields.get("block_count"), fields.get("attention.sliding_window", 0)
    config = config_from_gguf(
        fields,
        intermediate_size=fields.get("expert_feed_forward_length"),
        windows=tuple(None if layer % 2 else window for layer in range(layers)) if window else None,
        gate_limit=_LIMIT,
        gate_slope=_SLOPE,
        spans_heads=True,
        **expert_fields(fields),
    )
    if fields.get("rope.scaling.type", "none") != "yarn":
        return config
    divisors = yarn_from_gguf(fields, config.head_dim, truncate=False)  # the ramp keeps its fractions
    return replace(config, rope_divisors=divisors)


def _attention(config: ModelConfig, read: OperatorReader, index: int) -> Attention:
    attention = assembly.read_attention(config, read, index)
    named = read.tensor if read.layout == "gguf" else read.unsuffixed
    sinks = named("sinks", (config.num_heads,), at=(index,), dtype=torch.float32)
    attention.options = replace(attention.options, sinks=sinks)
    return attention


def _mlp(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    number, hidden, inner, at = config.num_experts, config.hidden_size, config.intermediate_size, (index,)
    if read.layout == "gguf":
        gates, ups = (read.stack(role, number, inner, hidden, at=at) for role in ("gates", "ups"))
        products: list[Matrix] = [concatenate_rows(pair) for pair in zip(gates, ups, strict=True)]
        downs = read.stack("downs", number, hidden, inner, at=at)
        shifts = [read.bias_of(role, (number, inner), at=at) for role in ("gates", "ups")]
        in_biases, out_biases = torch.cat(shifts, dim=1), read.bias_of("downs", (number, hidden), at=at)
    else:
        order = torch.cat((torch.arange(0, 2 * inner, 2), torch.arange(1, 2 * inner, 2)))  # gates, then factors
        products = [_rows(each, order) for each in _matrices(read, "gate_ups", (number, 2 * inner, hidden), at)]
        downs = _matrices(read, "downs", (number, hidden, inner), at)
        in_biases = read.unsuffixed("gate_up_biases", (number, 2 * inner), at=at)[:, order]
        out_biases = read.unsuffixed("down_biases", (number, hidden), at=at)
    limits = Limits(most=config.gate_limit or _LIMIT, slope=config.gate_slope)
    experts = (
        GatedMLP(Linear(product, shift), Linear(down, bias), activation=config.activation, limits=limits)
        for product, shift, down, bias in zip(products, in_biases, downs, out_biases, strict=True)
    )
    router = read.linear({"router": number}, hidden, at=at, bias=True)
    return MixtureOfExperts(router, experts, choice=Choice(num_chosen=config.num_chosen_experts))


def _matrices(read: OperatorReader, role: str, shape: tuple[int, int, int], at: tuple[int, ...]) -> list[Matrix]:
    number, rows, columns = shape
    if read.has(role, at=at):  # in MXFP4
        return read.stack(role, number, rows, columns, at=at)
    whole = read.unsuffixed(role, (number, columns, rows), at=at)
    return read.as_kept(role, whole.transpose(1, 2))


def _rows(matrix: Matrix, order: Tensor) -> Matrix:
    return matrix[order] if isinstance(matrix, Tensor) else matrix.rows(order)


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, attention=_attention, mlp=_mlp),
)
