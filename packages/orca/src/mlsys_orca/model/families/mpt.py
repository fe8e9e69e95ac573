"""MPT (MosaicML, 2023): biases by distance instead of positions, LayerNorm without a bias, no biases at all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.attention import mosaic_slopes
from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.config_readers import GGUF_STEMS, GgufFields, config_from_gguf, require
from mlsys_orca.model.families.gpt2 import config_by_gpt2_names
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.operator_reader import OperatorReader

_STEMS: Stems = {
    "gguf": GGUF_STEMS,
    "huggingface": {
        "embedding": "transformer.wte",
        "norm": "transformer.norm_f",
        "head": "lm_head",
        "attention_norm": "transformer.blocks.{}.norm_1",
        "qkv": "transformer.blocks.{}.attn.Wqkv",
        "o": "transformer.blocks.{}.attn.out_proj",
        "mlp_norm": "transformer.blocks.{}.norm_2",
        "up": "transformer.blocks.{}.ffn.up_proj",
        "down": "transformer.blocks.{}.ffn.down_proj",
    },
}
# Keys of attn_config that change the result -> the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention", None),
    "attn_uses_sequence_id": (False, None),
    "clip_qkv": (None, 0, False),
    "prefix_lm": (False, None),
    "qk_ln": (False, None),
    "alibi": (True, None),
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    require(raw, "d_model", "n_layers", "n_heads", "vocab_size")
    attention: Mapping[str, Any] = raw.get("attn_config") or {}
    for key, values in _NEUTRAL.items():
        refuse(attention.get(key, values[0]) not in values, f"attention with {key} = {attention.get(key)!r}")
    refuse(not raw.get("no_bias", True), "biases (no_bias)")
    refuse(raw.get("logit_scale") is not None, f"logits scaled by logit_scale = {raw.get('logit_scale')!r}")
    refuse(raw.get("expansion_ratio", 4) != 4, f"an expansion_ratio of {raw.get('expansion_ratio')} (4 is)")
    heads = raw["n_heads"]
    named = {"n_embd": raw["d_model"], "n_layer": raw["n_layers"], "n_head": heads, "activation_function": "gelu"}
    return config_by_gpt2_names(
        dict(raw) | named | {"n_inner": None, "n_positions": raw.get("max_seq_len", 2048)},
        "mpt",
        attention_scale=attention.get("softmax_scale"),
        alibi_slopes=mosaic_slopes(heads, most=attention.get("alibi_bias_max") or 8),
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    most = fields.get("attention.max_alibi_bias", 0.0)
    refuse(not most, "learned positions (no attention.max_alibi_bias)")
    return config_from_gguf(
        fields,
        norm="layer",
        activation="gelu",
        alibi_slopes=mosaic_slopes(fields.get("attention.head_count"), most=most),
    )


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(
        assembly.build,
        attention=assembly.read_joined_attention,
        mlp=assembly.read_plain_mlp,
        norm=partial(OperatorReader.layer_norm, bias=False),
    ),
)
