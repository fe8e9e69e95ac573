"""MiniCPM3 (2024): DeepSeek's latent attention without experts, and with Granite's multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlsys_orca.model import assembly
from mlsys_orca.model.config import LatentPart, ModelConfig, refuse
from mlsys_orca.model.config_readers import config_from_huggingface, require
from mlsys_orca.model.families import deepseek, granite
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.rope import scale_of_scores

_STEMS: Stems = {
    "huggingface": {
        **deepseek.FAMILY.stems["huggingface"],
        **{role: f"model.layers.{{}}.mlp.{role}_proj" for role in ("gate", "up", "down")},
    }
}
_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


def _from_huggingface(raw: Mapping[str, Any]) -> ModelConfig:
    raw = _DEFAULTS | dict(raw)
    require(raw, "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "num_hidden_layers", "num_attention_heads")
    refuse(bool(raw.get("attention_bias")), "biases of latent attention (attention_bias)")
    rotary, rank, plain = raw["qk_rope_head_dim"], raw["kv_lora_rank"], raw["qk_nope_head_dim"]
    values = raw.get("v_head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    config = config_from_huggingface(
        raw | {"head_dim": rotary},
        "minicpm3",
        num_kv_heads=1,
        head_dim=rank + rotary,
        rotary_dim=rotary,
        attention_scale=scale_of_scores(raw, plain + rotary),
        spans_heads=True,
        latent=LatentPart(query_rank=raw["q_lora_rank"], plain_dim=plain, value_dim=values),
    )
    depth = raw["scale_depth"]
    return granite.scaled(
        config,
        embedding=raw["scale_emb"],
        branch=1.0 if depth is None else depth * raw["num_hidden_layers"] ** -0.5,
        logits=raw["hidden_size"] / (raw["dim_model_base"] or raw["hidden_size"]),
    )


FAMILY = Family(
    from_huggingface=_from_huggingface,
    from_gguf=None,
    stems=_STEMS,
    build=partial(assembly.build, attention=partial(deepseek.read_latents, in_pairs=False)),
)
