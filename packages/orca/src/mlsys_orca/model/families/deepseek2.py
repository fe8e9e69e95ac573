"""DeepSeek-V2 and V3 as GGUF files have them, ``deepseek2``: latent attention's second products apart, or as one.

What differs from directories, for :mod:`.deepseek`, which has the rest.
"""

from __future__ import annotations

from dataclasses import replace

from mlsys_orca.model.config import ExpertChoice, LatentPart, ModelConfig, refuse
from mlsys_orca.model.experts import GGUF_EXPERTS, expert_fields
from mlsys_orca.model.gguf_config import GGUF_STEMS, GgufFields, config_from_gguf
from mlsys_orca.model.rope import yarn_amplitude

_ROLES = ("gate", "up", "down")
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's expert_gating_func
_LOG_UNIT = 0.1  # by which llama.cpp's converter has multiplied mscale_all_dim
STEMS: dict[str, str] = {
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
_KEYS = frozenset({"expert_count", "expert_shared_count", "rope.scaling.yarn_log_multiplier"})


def from_gguf(fields: GgufFields) -> ModelConfig:
    """Return the configuration that a file's metadata states."""
    rotary, rank = fields.get("rope.dimension_count"), fields.get("attention.kv_lora_rank")
    keys = fields.get("attention.key_length_mla", fields.get("attention.key_length"))
    values = fields.get("attention.value_length_mla", fields.get("attention.value_length"))
    refuse(not fields.get("expert_count", 0), "latent attention without experts")
    gating = fields.get("expert_gating_func", _SOFTMAX) or _SOFTMAX
    refuse(gating not in (_SOFTMAX, _SIGMOID), f"experts weighted by function {gating} (softmax and sigmoid are)")
    scale = keys**-0.5
    if fields.get("rope.scaling.type", "none") == "yarn":
        stretch = fields.get("rope.scaling.yarn_log_multiplier", 0.0) / _LOG_UNIT  # mscale_all_dim, which mscale equals
        refuse(not stretch > 0, "rotary scaling 'yarn' without rope.scaling.yarn_log_multiplier")
        scale *= yarn_amplitude(float(fields.get("rope.scaling.factor")), stretch) ** 2
    lengths = {f"{fields.architecture}.attention.{name}_length": rotary for name in ("key", "value")}
    inner, dense = fields.get("expert_feed_forward_length"), fields.get("leading_dense_block_count", 0)
    return config_from_gguf(
        replace(fields, metadata={**fields.metadata, **lengths}),
        implements=_KEYS,
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
            scale=float(fields.get("expert_weights_scale", 1.0)),
            has_preference=f"blk.{dense}.exp_probs_b.bias" in fields.tensor_names,
            num_groups=fields.get("expert_group_count", 1) or 1,
            num_chosen_groups=fields.get("expert_group_used_count", 1) or 1,
            group_score="two_largest" if gating == _SIGMOID else "largest",
        ),
        **expert_fields(fields),
    )
