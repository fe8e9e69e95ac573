"""Phi-1, Phi-1.5 and Phi-2 (Microsoft, 2023): parallel branches behind one LayerNorm, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Attention
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.families import llama
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.layers import LayerNorm
from mlsys_orca.model.operator_reader import OperatorReader
from torch import Tensor

_STEMS: Stems = {
    "gguf": llama.STEMS["gguf"],
    "huggingface": {
        **llama.STEMS["huggingface"],
        "norm": "model.final_layernorm",
        "o": "model.layers.{}.self_attn.dense",
        "q_norm": "model.layers.{}.self_attn.q_layernorm",
        "k_norm": "model.layers.{}.self_attn.k_layernorm",
        "up": "model.layers.{}.mlp.fc1",
        "down": "model.layers.{}.mlp.fc2",
    },
}
_BIASED: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "head_bias": True}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    return config_from_huggingface(
        {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"} | dict(raw),
        "phi",
        partial_rotary=True,
        norm_eps=raw.get("layer_norm_eps", 1e-5),
        parallel_residual=True,
        qk_norm=bool(raw.get("qk_layernorm", False)),
        **_BIASED,
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(
        fields, norm="layer", partial_rotary=True, activation="gelu_tanh", parallel_residual=True, **_BIASED
    )


def _attention(config: ModelConfig, read: OperatorReader, index: int) -> Attention:
    if read.layout == "gguf" and read.has("qkv", at=(index,)):
        return assembly.read_joined_attention(config, read, index)
    return assembly.read_attention(config, read, index, qk_norm=_qk_norm(config, read, index))


def _qk_norm(config: ModelConfig, read: OperatorReader, index: int) -> LayerNorm | None:
    if not config.qk_norm:
        return None

    def of_heads(of_one: Tensor, heads: int) -> Tensor:
        return of_one.expand(heads, -1)

    norms = [read.layer_norm(role, config.head_dim, at=(index,)) for role in ("q_norm", "k_norm")]
    heads = (config.num_heads, config.num_kv_heads)
    weight, bias = (
        torch.cat([of_heads(getattr(norm, part), count) for norm, count in zip(norms, heads, strict=True)])
        for part in ("weight", "bias")
    )
    return LayerNorm(weight, bias, hidden_size=config.head_dim, eps=config.norm_eps, dtype=read.dtype)


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, attention=_attention, mlp=assembly.read_plain_mlp, norm=OperatorReader.layer_norm),
)
