"""Bamba (2024): Mamba-2's recurrent layers between some that attend, each before a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model import assembly, recurrent
from mlsys_orca.model.config import ModelConfig, RecurrentPart, refuse
from mlsys_orca.model.config_readers import config_from_huggingface, require
from mlsys_orca.model.families import llama, mamba2
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader
from torch import nn

_MIXER = ("in", "taps", "decay", "step_bias", "skip", "gate_norm", "out")
STEMS = {
    **llama.STEMS["huggingface"],
    **{
        role: mamba2.STEMS["huggingface"][role].replace("backbone.layers.{}.mixer", "model.layers.{}.mamba")
        for role in _MIXER
    },
}
_STEMS: Stems = {
    "huggingface": {
        **STEMS,
        "norm": "model.final_layernorm",
        "mlp_norm": "model.layers.{}.pre_ff_layernorm",
        **{role: f"model.layers.{{}}.feed_forward.{role}_proj" for role in ("gate", "up", "down")},
    }
}
DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_OWN: dict[str, Any] = DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 262144}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _OWN | dict(raw) | {"partial_rotary_factor": 0.5}  # whatever the file says, in transformers too
    require(raw, "num_hidden_layers")
    attending = raw.get("attn_layer_indices") or []
    layers = [index not in attending for index in range(raw["num_hidden_layers"])]
    return config_from_huggingface(
        raw, "bamba", partial_rotary=True, recurrent=recurrent_part(raw, layers), spans_heads=True
    )


def recurrent_part(raw: Mapping[str, Any], layers: Sequence[bool]) -> RecurrentPart:
    """Return the sizes that a ``config.json`` with Bamba's keys states; ``layers``: which ones are recurrent."""
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


def read_branch(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    """Read the recurrent part of layer ``index``, or its attention."""
    part = config.recurrent
    assert part is not None
    if part.layers[index]:
        return recurrent.read_mixer(config, read, index)
    attention = assembly.read_attention(config, read, index)
    attention.index = part.kv_index(index)
    return attention


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=None,
    stems=_STEMS,
    build=partial(assembly.build, attention=read_branch),
)
