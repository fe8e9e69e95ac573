"""DeepSeek-V2 and V3 (2024): latent attention, experts in groups beside shared ones, dense layers first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mlsys_orca.model import assembly
from mlsys_orca.model.config import ExpertChoice, LatentPart, ModelConfig, refuse
from mlsys_orca.model.config_readers import (
    GGUF_EXPERTS,
    GGUF_STEMS,
    GgufFields,
    config_from_gguf,
    config_from_huggingface,
    expert_fields,
    require,
)
from mlsys_orca.model.experts import SharedExpert, choice_of, read_experts, read_gated
from mlsys_orca.model.families import llama
from mlsys_orca.model.family import Family, Stems
from mlsys_orca.model.latent import LatentAttention, rows_of
from mlsys_orca.model.layers import Linear, RMSNorm, halves_of_pairs
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.rope import scale_of_scores, yarn_amplitude
from torch import nn

_ROLES = ("gate", "up", "down")
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's expert_gating_func
_LOG_UNIT = 0.1  # by which llama.cpp's converter has multiplied mscale_all_dim
_GGUF: dict[str, str] = {
    **{role: stem for role, stem in GGUF_STEMS.items() if role not in ("k", "v", *_ROLES)},
    **GGUF_EXPERTS,
    "q_down": "blk.{}.attn_q_a",
    "q_norm": "blk.{}.attn_q_a_norm",
    "q_up": "blk.{}.attn_q_b",
    "kv_down": "blk.{}.attn_kv_a_mqa",
    "kv_norm": "blk.{}.attn_kv_a_norm",
    "kv_up": "blk.{}.attn_kv_b",
    "key_up": "blk.{}.attn_k_b",
    "value_up": "blk.{}.attn_v_b",
    "preference": "blk.{}.exp_probs_b",
    **{f"shared.{role}": f"blk.{{}}.ffn_{role}_shexp" for role in _ROLES},
    **{f"dense.{role}": f"blk.{{}}.ffn_{role}" for role in _ROLES},
}


def _from_gguf(fields: GgufFields) -> ModelConfig:
    """Return the configuration that a file's metadata states."""
    rotary, rank = fields.get("rope.dimension_count"), fields.get("attention.kv_lora_rank")
    keys = fields.get("attention.key_length_mla", fields.get("attention.key_length"))
    values = fields.get("attention.value_length_mla", fields.get("attention.value_length"))
    refuse(not fields.get("expert_count", 0), "latent attention without experts")
    gating = fields.get("expert_gating_func", _SOFTMAX) or _SOFTMAX
    refuse(gating not in (_SOFTMAX, _SIGMOID), f"experts weighted by function {gating} (softmax and sigmoid are)")
    scale = keys**-0.5
    refuse(fields.get("rope.scaling.attn_factor", 1.0) != 1.0, "latent attention with rope.scaling.attn_factor")
    if fields.get("rope.scaling.type", "none") == "yarn":
        stretch = fields.get("rope.scaling.yarn_log_multiplier", 0.0) / _LOG_UNIT  # mscale_all_dim, which mscale equals
        refuse(not stretch > 0, "rotary scaling 'yarn' without rope.scaling.yarn_log_multiplier")
        scale *= yarn_amplitude(float(fields.get("rope.scaling.factor")), stretch) ** 2
    lengths = {f"{fields.architecture}.attention.{name}_length": rotary for name in ("key", "value")}
    inner, dense = fields.get("expert_feed_forward_length"), fields.get("leading_dense_block_count", 0)
    return config_from_gguf(
        replace(fields, metadata={**fields.metadata, **lengths}),
        num_kv_heads=1,
        head_dim=rank + rotary,
        rotary_dim=rotary,
        rope_amplitude=1.0,
        attention_scale=scale,
        spans_heads=True,
        latent=LatentPart(
            query_rank=fields.get("attention.q_lora_rank", 0) or None, plain_dim=keys - rotary, value_dim=values
        ),
        intermediate_size=inner,
        shared_expert_size=inner * fields.get("expert_shared_count"),
        dense=tuple(layer < dense for layer in range(fields.get("block_count"))),
        dense_size=fields.get("feed_forward_length"),
        expert_choice=ExpertChoice(
            scoring="sigmoid" if gating == _SIGMOID else "softmax",
            sums_to_one=bool(fields.get("expert_weights_norm", False)),
            scale=float(fields.get("expert_weights_scale", 1.0)) or 1.0,
            has_preference=f"blk.{dense}.exp_probs_b.bias" in fields.tensor_names,
            num_groups=fields.get("expert_group_count", 1) or 1,
            num_chosen_groups=fields.get("expert_group_used_count", 1) or 1,
            group_score="two_largest" if gating == _SIGMOID else "largest",
        ),
        **expert_fields(fields),
    )


_LAYER = "model.layers.{}."
_STEMS: Stems = {
    "gguf": _GGUF,
    "huggingface": {
        **{role: stem for role, stem in llama.STEMS["huggingface"].items() if role not in ("q", "k", "v")},
        "q": f"{_LAYER}self_attn.q_proj",
        "q_down": f"{_LAYER}self_attn.q_a_proj",
        "q_norm": f"{_LAYER}self_attn.q_a_layernorm",
        "q_up": f"{_LAYER}self_attn.q_b_proj",
        "kv_down": f"{_LAYER}self_attn.kv_a_proj_with_mqa",
        "kv_norm": f"{_LAYER}self_attn.kv_a_layernorm",
        "kv_up": f"{_LAYER}self_attn.kv_b_proj",
        "router": f"{_LAYER}mlp.gate",
        "preference": f"{_LAYER}mlp.gate.e_score_correction_bias",
        **{role: f"{_LAYER}mlp.experts.{{}}.{role}_proj" for role in _ROLES},
        **{f"shared.{role}": f"{_LAYER}mlp.shared_experts.{role}_proj" for role in _ROLES},
        **{f"dense.{role}": f"{_LAYER}mlp.{role}_proj" for role in _ROLES},
    },
}


def _from_huggingface(raw: Mapping[str, Any], *, is_v3: bool) -> ModelConfig:
    raw = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128} | dict(raw)
    require(raw, "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_experts_per_tok")
    require(raw, "n_routed_experts", "moe_intermediate_size", "n_shared_experts", "num_hidden_layers")
    known = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    method = raw.get("topk_method", known[0])
    refuse(method not in known, f"experts chosen by {method!r} ({', '.join(known)})")
    refuse(bool(raw.get("attention_bias")), "biases of latent attention (attention_bias)")
    refuse(not is_v3 and bool(raw.get("norm_topk_prob")), "weights of experts that sum to one (norm_topk_prob)")
    refuse(raw.get("moe_layer_freq", 1) != 1, "layers without experts between those with (moe_layer_freq)")
    refuse(not raw.get("rope_interleave", True), "rotary pairs half a head apart (rope_interleave)")
    rotary, rank = raw["qk_rope_head_dim"], raw["kv_lora_rank"]
    plain, layers, dense = raw["qk_nope_head_dim"], raw["num_hidden_layers"], raw.get("first_k_dense_replace", 0)
    groups = [(raw.get(key) or 1) if method != "greedy" else 1 for key in ("n_group", "topk_group")]
    return config_from_huggingface(
        {"rms_norm_eps": 1e-6} | raw | {"head_dim": rotary},
        "deepseek_v3" if is_v3 else "deepseek_v2",
        num_kv_heads=1,
        head_dim=rank + rotary,
        rotary_dim=rotary,
        attention_scale=scale_of_scores(raw, plain + rotary),
        spans_heads=True,
        latent=LatentPart(query_rank=raw.get("q_lora_rank"), plain_dim=plain, value_dim=raw["v_head_dim"]),
        intermediate_size=raw["moe_intermediate_size"],
        shared_expert_size=raw["moe_intermediate_size"] * raw["n_shared_experts"],
        dense=tuple(layer < dense for layer in range(layers)),
        dense_size=raw["intermediate_size"],
        num_experts=raw["n_routed_experts"],
        num_chosen_experts=raw["num_experts_per_tok"],
        expert_choice=ExpertChoice(
            scoring="sigmoid" if is_v3 else "softmax",
            sums_to_one=is_v3 and bool(raw.get("norm_topk_prob", True)),
            scale=float(raw.get("routed_scaling_factor", 2.5 if is_v3 else 1.0)),
            has_preference=is_v3,
            num_groups=groups[0],
            num_chosen_groups=groups[1],
            group_score="two_largest" if is_v3 else "largest",
        ),
    )


def read_latents(config: ModelConfig, read: OperatorReader, index: int, *, in_pairs: bool = True) -> LatentAttention:
    """Read latent attention of layer ``index``; ``in_pairs``: rotary pairs stand beside each other in the file."""
    latent, rotary, at, hidden = config.latent, config.rotary_dim, (index,), config.hidden_size
    assert latent is not None
    assert rotary is not None
    heads, plain, rank = config.num_heads, latent.plain_dim, config.head_dim - rotary
    if latent.query_rank is None:
        queries = read.linear({"q": heads * (plain + rotary)}, hidden, at=at)
    else:
        queries = read.linear({"q_up": heads * (plain + rotary)}, latent.query_rank, at=at)
    rows = torch.arange(heads * (plain + rotary)).view(heads, -1)
    halves = torch.arange(rotary)
    if in_pairs:
        halves = halves_of_pairs(halves, head_dim=rotary)
    down = read.linear({"kv_down": rank + rotary}, hidden, at=at)
    if read.layout == "gguf" and read.has("key_up", at=at):
        key_up = read.tensor("key_up", (heads, rank, plain), at=at)
        value_up = read.tensor("value_up", (heads, latent.value_dim, rank), at=at)
    else:
        ups = read.tensor("kv_up", (heads * (plain + latent.value_dim), rank), at=at).view(heads, -1, rank)
        key_up, value_up = ups[:, :plain].transpose(1, 2), ups[:, plain:]
    return LatentAttention(
        config,
        index,
        query_down=None if latent.query_rank is None else read.linear({"q_down": latent.query_rank}, hidden, at=at),
        query_norm=None if latent.query_rank is None else _norm(read, "q_norm", latent.query_rank, at),
        query_plain=rows_of(queries, rows[:, :plain].flatten()),
        query_rotary=[rows_of(queries, own[plain:][halves]) for own in rows],
        key_rotary=rows_of(down, rank + halves),
        latent=rows_of(down, torch.arange(rank)),
        latent_norm=_norm(read, "kv_norm", rank, at),
        key_up=[Linear(up.contiguous()) for up in key_up],
        value_up=[Linear(up.contiguous()) for up in value_up],
        output=read.linear({"o": hidden}, heads * latent.value_dim, at=at),
    )


def _norm(read: OperatorReader, role: str, size: int, at: tuple[int, ...]) -> RMSNorm:
    norm = read.rms_norm(role, size, at=at)
    norm.eps = 1e-6  # whatever the others have
    return norm


def _mlp(config: ModelConfig, read: OperatorReader, index: int) -> nn.Module:
    if config.dense is not None and config.dense[index]:
        return read_gated(config, read, index, "dense", config.dense_size)
    chosen = choice_of(config)
    if config.expert_choice is not None and config.expert_choice.has_preference:
        named = read.bias_of if read.layout == "gguf" else read.unsuffixed
        chosen = choice_of(config, named("preference", (config.num_experts,), at=(index,), dtype=torch.float32))
    experts = read_experts(config, read, index, choice=chosen)
    return SharedExpert(experts, read_gated(config, read, index, "shared", config.shared_expert_size))


FAMILY = Family(
    from_huggingface=partial(_from_huggingface, is_v3=True),
    from_gguf=_from_gguf,
    stems=_STEMS,
    build=partial(assembly.build, attention=read_latents, mlp=_mlp),
    ignorable_prefixes=("model.layers.61.",),  # what guesses further tokens
)
V2 = replace(FAMILY, from_huggingface=partial(_from_huggingface, is_v3=False), ignorable_prefixes=())
