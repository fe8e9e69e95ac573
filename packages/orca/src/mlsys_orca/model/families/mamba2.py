"""Mamba-2 (Dao and Gu, 2024): recurrent layers alone, each one branch, without attention and without an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model import assembly
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.family import Family
from mlsys_orca.model.huggingface_config import refuse_common, require
from mlsys_orca.model.latent import rows_of
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.recurrent import GateNorm, MixerLayer, Recurrence
from mlsys_orca.model.states import RecurrentPart
from mlsys_orca.model.weights.checkpoint import Layout

STEMS: dict[Layout, dict[str, str]] = {
    "huggingface": {
        "embedding": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "head": "lm_head",
        "mixer_norm": "backbone.layers.{}.norm",
        "in": "backbone.layers.{}.mixer.in_proj",
        "taps": "backbone.layers.{}.mixer.conv1d",
        "decay": "backbone.layers.{}.mixer.A_log",
        "step_bias": "backbone.layers.{}.mixer.dt_bias",
        "skip": "backbone.layers.{}.mixer.D",
        "gate_norm": "backbone.layers.{}.mixer.norm",
        "out": "backbone.layers.{}.mixer.out_proj",
    },
}
_DEFAULTS: dict[str, Any] = {
    "num_heads": 128,
    "head_dim": 64,
    "vocab_size": 32768,
    "hidden_size": 4096,
    "state_size": 128,
    "num_hidden_layers": 64,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "n_groups": 8,
    "use_bias": False,
    "use_conv_bias": True,
}
_MAX_POSITIONS = 32_768  # tokens; a state has no end, and a file states none


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    require(raw, "num_heads", "head_dim", "vocab_size", "hidden_size", "state_size", "num_hidden_layers", "n_groups")
    require(raw, "conv_kernel")
    refuse_common(raw)
    check_steps(raw)
    refuse(bool(raw.get("use_bias")), "products of recurrent layers with biases (use_bias)")
    refuse(not raw["use_conv_bias"], "a convolution without a bias (use_conv_bias)")
    num_layers, num_heads = raw["num_hidden_layers"], raw["num_heads"]
    inner = num_heads * raw["head_dim"]
    if raw["expand"] * raw["hidden_size"] != inner:
        raise InvalidInputError(f"{num_heads} heads of {raw['head_dim']} features are not expand * hidden_size")
    part = RecurrentPart(
        rule="decay",
        layers=(True,) * num_layers,
        num_heads=num_heads,
        num_groups=raw["n_groups"],
        head_dim=raw["head_dim"],
        state_size=raw["state_size"],
        num_taps=raw["conv_kernel"],
        norm_eps=raw["layer_norm_epsilon"],
    )
    return ModelConfig(
        architecture="mamba2",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_positions=_MAX_POSITIONS,
        norm_eps=raw["layer_norm_epsilon"],
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        recurrent=part,
        spans_heads=True,
    )


def check_steps(raw: Mapping[str, Any]) -> None:
    """Refuse what a ``config.json`` may ask of steps and activations of recurrent layers, and is not implemented."""
    low, high = raw.get("time_step_limit") or (0.0, inf)
    is_open = high in (inf, {"__float__": "Infinity"})  # as transformers writes it
    refuse(low != 0 or not is_open, "steps of recurrent layers that are clamped (time_step_limit)")
    refuse(
        raw.get("hidden_act", "silu") not in ("silu", "swish"), "recurrent layers with an activation other than silu"
    )


def read_mixer(config: ModelConfig, read: OperatorReader, index: int) -> Recurrence:
    """Read the recurrent part of layer ``index``, whose first product gives gates, values, keys, queries and steps."""
    part, hidden, at = config.recurrent, config.hidden_size, (index,)
    assert part is not None
    inner, channels, heads = part.num_values, part.num_channels, part.num_heads
    gates, mixed = torch.arange(inner), torch.arange(inner, inner + channels)
    steps = torch.arange(inner + channels, inner + channels + heads)
    first = read.linear({"in": inner + channels + heads}, hidden, at=at)
    fp32: dict[str, Any] = {"at": at, "dtype": torch.float32}
    return Recurrence(
        part,
        part.index(index),
        input=rows_of(first, torch.cat([mixed, gates, steps])),
        taps=read.tensor("taps", (channels, 1, part.num_taps), **fp32)[:, 0].T.contiguous(),
        taps_bias=read.bias("taps", channels, at=at),
        decay=-read.unsuffixed("decay", (heads,), **fp32).exp(),
        step_bias=read.unsuffixed("step_bias", (heads,), **fp32),
        skip=read.unsuffixed("skip", (heads,), **fp32),
        norm=GateNorm(
            weight=read.tensor("gate_norm", (inner,), **fp32),
            size=inner // part.num_groups,
            eps=part.norm_eps,
            is_first=False,
        ),
        output=read.linear({"out": hidden}, inner, at=at),
    )


def _layer(config: ModelConfig, read: OperatorReader, index: int) -> MixerLayer:
    norm = read.rms_norm("mixer_norm", config.hidden_size, at=(index,))
    return MixerLayer(norm=norm, mixer=read_mixer(config, read, index))


def _build(config: ModelConfig, read: OperatorReader) -> Decoder:
    decoder = assembly.build(config, read, layer=_layer)
    decoder.rotary = None
    return decoder


FAMILY = Family(from_huggingface=_from_huggingface, from_gguf=None, stems=STEMS, build=_build)
