"""GPT-J (Wang and Komatsuzaki, 2021): parallel branches behind one LayerNorm, rotary pairs beside each other.

Biases in the MLP and the head alone. GGUF has no layout for the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model import assembly
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.families.gpt2 import config_by_gpt2_names
from mlsys_orca.model.family import Family
from mlsys_orca.model.operator_reader import OperatorReader

_STEMS = {
    "embedding": "transformer.wte",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "transformer.h.{}.ln_1",
    "q": "transformer.h.{}.attn.q_proj",
    "k": "transformer.h.{}.attn.k_proj",
    "v": "transformer.h.{}.attn.v_proj",
    "o": "transformer.h.{}.attn.out_proj",
    "up": "transformer.h.{}.mlp.fc_in",
    "down": "transformer.h.{}.mlp.fc_out",
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    config = config_by_gpt2_names(
        raw, "gptj", max_positions=2048, tied=False, parallel_residual=True, mlp_bias=True, head_bias=True
    )
    rotary_dim = raw.get("rotary_dim", 64)
    if not isinstance(rotary_dim, int) or not 0 < rotary_dim <= config.head_dim:
        raise InvalidInputError(f"config.json has rotary_dim = {rotary_dim!r} for heads of {config.head_dim} features")
    return replace(config, rotary_dim=rotary_dim if rotary_dim != config.head_dim else None)


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=None,
    stems={"huggingface": _STEMS},
    build=partial(
        assembly.build,
        attention=assembly.read_attention_of_pairs,
        mlp=assembly.read_plain_mlp,
        norm=OperatorReader.layer_norm,
    ),
    ignorable_suffixes=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),  # causal masks, sines
)
