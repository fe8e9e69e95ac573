"""Granite (IBM, 2024): Llama whose embeddings, scores, branches and logits are each multiplied by a number.

The states stand here divided by the branches' number ``r``, so that no branch is scaled: what an RMSNorm makes of
``r * s`` with ``eps`` is what it makes of ``s`` with ``eps / r ** 2``, and embeddings are scaled by as much less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.config_readers import GgufFields, config_from_gguf, config_from_huggingface
from mlsys_orca.model.families import llama


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    return scaled(
        config_from_huggingface(raw, "granite", attention_scale=raw.get("attention_multiplier", 1.0)),
        embedding=raw.get("embedding_multiplier", 1.0),
        branch=raw.get("residual_multiplier", 1.0),
        logits=raw.get("logits_scaling", 1.0),
    )


def _from_gguf(fields: GgufFields) -> ModelConfig:
    numbers = numbers_of_file(fields)
    refuse(not fields.get("rope.scaling.finetuned", True), "rope.scaling.finetuned = False, no rotary positions")
    return scaled(config_from_gguf(fields, attention_scale=fields.get("attention.scale", 0.0) or None), **numbers)


def numbers_of_file(fields: GgufFields) -> dict[str, float]:
    """Return the numbers that a GGUF states, 1 where it has 0; see :func:`scaled`."""
    keys = {"embedding": "embedding_scale", "branch": "residual_scale", "logits": "logit_scale"}
    return {name: fields.get(key, 1.0) or 1.0 for name, key in keys.items()}


def scaled(config: ModelConfig, *, embedding: float, branch: float, logits: float) -> ModelConfig:
    """Return ``config`` with the numbers that multiply embeddings, branches, and (below the line) logits.

    Raises:
        UnsupportedModelError: one is not above 0.
    """
    for name, number in (("embedding", embedding), ("residual", branch), ("logits", logits)):
        refuse(not number > 0, f"the {name} multiplier {number}, which is not above 0")
    return replace(
        config,
        embedding_scale=config.embedding_scale * embedding / branch,
        norm_eps=config.norm_eps / branch**2,
        logit_scale=1.0 / logits,
    )


FAMILY = replace(llama.FAMILY, from_huggingface=_from_huggingface, from_gguf=_from_gguf)
