"""GPT-J (Wang and Komatsuzaki, 2021): parallel branches behind one LayerNorm, rotary pairs beside each other.

Biases in the MLP and the head alone. GGUF has no layout for the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_orca.model import assembly
from mlsys_orca.model.config import ModelConfig, activation_name
from mlsys_orca.model.family import Family
from mlsys_orca.model.huggingface_config import refuse_common, require
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
    require(raw, "n_embd", "n_layer", "n_head", "vocab_size")
    refuse_common(raw)
    hidden, heads = raw["n_embd"], raw["n_head"]
    rotary_dim = raw.get("rotary_dim", 64)
    if not isinstance(rotary_dim, int) or not 0 < rotary_dim <= hidden // heads:
        raise InvalidInputError(f"config.json has rotary_dim = {rotary_dim!r} for heads of {hidden // heads} features")
    return ModelConfig(
        architecture="gptj",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw.get("n_inner") or 4 * hidden,
        num_layers=raw["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=raw.get("n_positions", 2048),
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        activation=activation_name(raw.get("activation_function", "gelu_new")),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rotary_dim=rotary_dim if rotary_dim != hidden // heads else None,
        parallel_residual=True,
        mlp_bias=True,
        head_bias=True,
    )


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
