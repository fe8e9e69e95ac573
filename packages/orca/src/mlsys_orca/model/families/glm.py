"""GLM-4 (Zhipu AI, 2024) and GLM-4-0414: rotary pairs beside each other on half of a head, gate and up in one matrix.

GLM-4-0414 normalises what a branch gives, too. GGUF has the second alone, as ``glm4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.config_readers import GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.families import llama, phi3
from mlsys_orca.model.family import Family, Stems

_HUGGINGFACE = {**llama.STEMS["huggingface"], "gate_up": "model.layers.{}.mlp.gate_up_proj"}
_STEMS_4: Stems = {
    "gguf": {
        **llama.STEMS["gguf"],
        "gate_up": "blk.{}.ffn_up",
        "attention_out_norm": "blk.{}.post_attention_norm",
        "mlp_out_norm": "blk.{}.post_ffw_norm",
    },
    "huggingface": {
        **_HUGGINGFACE,
        "attention_out_norm": "model.layers.{}.post_self_attn_layernorm",
        "mlp_out_norm": "model.layers.{}.post_mlp_layernorm",
    },
}
_DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}


def _from_huggingface(raw: Mapping[str, Any], *, architecture: str) -> ModelConfig:
    return config_from_huggingface(_DEFAULTS | dict(raw), architecture, partial_rotary=True, output_bias=False)


def _from_gguf(fields: GgufFields) -> ModelConfig:
    return config_from_gguf(fields, partial_rotary=True)


FAMILY = Family(
    from_huggingface=partial(_from_huggingface, architecture="glm"),
    from_gguf=None,
    stems={"huggingface": _HUGGINGFACE},
    build=partial(assembly.build, attention=assembly.read_attention_of_pairs, mlp=phi3.read_mlp),
)
GLM4 = Family(
    from_huggingface=partial(_from_huggingface, architecture="glm4"),
    from_gguf=_from_gguf,
    stems=_STEMS_4,
    build=partial(
        assembly.build,
        layer=partial(assembly.read_sandwich_layer, attention=assembly.read_attention_of_pairs, mlp=phi3.read_mlp),
    ),
)
