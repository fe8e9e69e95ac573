"""Qwen3.5 (2026), its text part: Qwen3-Next's layers with an MLP in place of experts, or with experts.

Positions of three axes are those of text on each, so that they turn heads as one axis does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.config_readers import GgufFields
from mlsys_orca.model.families import llama, qwen2_moe, qwen3_next
from mlsys_orca.model.families.gemma2 import one_plus_norm
from mlsys_orca.model.family import Family, Stems

_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_STEMS: Stems = {
    "huggingface": {
        **qwen3_next.FAMILY.stems["huggingface"],
        **{part.removeprefix("in_proj_"): f"model.layers.{{}}.linear_attn.{part}" for part in _PARTS},
        **{role: llama.STEMS["huggingface"][role] for role in ("gate", "up", "down")},
    },
    "gguf": {**qwen3_next.FAMILY.stems["gguf"], "b": "blk.{}.ssm_beta", "a": "blk.{}.ssm_alpha"},
}
_EXPERTS = {
    **{role: qwen2_moe.FAMILY.stems["huggingface"][role] for role in ("gate", "up", "down")},
    "products": "model.layers.{}.mlp.experts.gate_up_proj",  # or those of all experts in one tensor
    "downs": "model.layers.{}.mlp.experts.down_proj",
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    sizes = {"vocab_size": 248320, "num_key_value_heads": 4, "intermediate_size": 12288, "num_hidden_layers": 32}
    raw = qwen3_next.DEFAULTS | sizes | {"hidden_size": 4096} | dict(raw)
    return qwen3_next.config_of(raw, "qwen3_5", has_experts=False)


def _with_experts_from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    sizes = {"vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40}
    raw = qwen3_next.DEFAULTS | sizes | {"hidden_size": 2048} | dict(raw) | {"norm_topk_prob": True}
    return qwen3_next.config_of(raw, "qwen3_5_moe")


def _from_gguf(fields: GgufFields) -> ModelConfig:
    fields.read.add("rope.dimension_sections")  # a text's positions are alike in the first three, and 0 in the last
    sections = fields.metadata.get(f"{fields.architecture}.rope.dimension_sections", [])
    refuse(not isinstance(sections, list) or any(sections[3:]), f"rope.dimension_sections = {sections!r}")
    guessing = int(fields.get("nextn_predict_layers", 0))
    config = qwen3_next.config_of_file(fields, num_layers=int(fields.get("block_count")) - guessing)
    part = config.recurrent
    assert part is not None
    return replace(config, recurrent=replace(part, is_tiled=part.num_heads != part.num_groups))


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, attention=qwen3_next.read_branch, norm=one_plus_norm),
    ignorable_prefixes=("mtp.",),  # what guesses further tokens
    guesses_in_gguf=True,
)
WITH_EXPERTS = replace(
    FAMILY,
    from_huggingface=_with_experts_from_huggingface,
    stems={**_STEMS, "huggingface": {**_STEMS["huggingface"], **_EXPERTS}},
    build=partial(
        assembly.build, attention=qwen3_next.read_branch, mlp=qwen2_moe.read_shared_experts, norm=one_plus_norm
    ),
)
