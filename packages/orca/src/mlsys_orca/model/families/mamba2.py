"""Mamba-2 (Dao and Gu, 2024): recurrent layers alone, each one branch, without attention and without an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model import assembly, recurrent
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig, RecurrentPart, refuse
from mlsys_orca.model.config_readers import GGUF_STEMS, GgufFields, config_from_gguf, refuse_common, require
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.recurrent import MixerLayer

STEMS: Stems = {
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
    "gguf": {
        **GGUF_STEMS,
        "mixer_norm": "blk.{}.attn_norm",
        **recurrent.GGUF_STEMS,
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
    recurrent.check_steps(raw)
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


def _from_gguf(fields: GgufFields) -> ModelConfig:
    prefix = f"{fields.architecture}."
    none = {"attention.head_count": 1, "attention.head_count_kv": 1, "attention.key_length": 2}  # of attention
    stated = {prefix + key: value for key, value in none.items()} | {prefix + "feed_forward_length": 1}
    part = recurrent.part_from_gguf(fields, (True,) * fields.get("block_count"))
    config = config_from_gguf(replace(fields, metadata={**fields.metadata, **stated}), spans_heads=True)
    # What the file states of its context is a number that its writer made up.
    return replace(config, intermediate_size=part.num_values, max_positions=_MAX_POSITIONS, recurrent=part)


def _layer(config: ModelConfig, read: OperatorReader, index: int) -> MixerLayer:
    norm = read.rms_norm("mixer_norm", config.hidden_size, at=(index,))
    return MixerLayer(norm=norm, mixer=recurrent.read_mixer(config, read, index))


def _build(config: ModelConfig, read: OperatorReader) -> Decoder:
    decoder = assembly.build(config, read, layer=_layer)
    decoder.rotary = None
    return decoder


FAMILY = Family(from_huggingface=_from_huggingface, from_gguf=_from_gguf, stems=STEMS, build=_build)
