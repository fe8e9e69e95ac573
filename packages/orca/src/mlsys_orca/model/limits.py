"""Numbers of a model file's configuration, checked before any family computes with them.

A file from anywhere may say ten million layers, no heads or an epsilon that is none. The readers call
:func:`check_numbers` on what a file says, in either format; :class:`~mlsys_orca.model.config.ModelConfig` then checks
what came of it. Limits are far above any model's, and low enough that nothing of their size is ever made in vain.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mlsys_core.errors import InvalidInputError

MAX_LAYERS = 2048
MAX_HEADS = 65_536
MAX_HEAD_DIM = 65_536
MAX_WIDTH = 2**22  # features of a state or inside an MLP
MAX_VOCAB = 2**24  # tokens
MAX_POSITIONS = 2**31  # tokens of context
MAX_EXPERTS = 65_536
MAX_MAGNITUDE = float(2**53)  # of any number


class _Rule(NamedTuple):
    """Bounds of the numbers at keys of a kind; both ends allowed."""

    pattern: str  # of the whole key, without a format's prefix
    least: float
    most: float


_TINY = 1e-30  # above zero
_RULES = [
    _Rule(r"(n|num|num_hidden|num_decoder|num_encoder)_layers?|(decoder_)?block_count", 1, MAX_LAYERS),
    _Rule(r"(num|n)_heads?|num_(attention|key_value)_heads", 1, MAX_HEADS),
    _Rule(r"attention\.head_count(_kv)?", 0, MAX_HEADS),  # 0: none of its layers attends
    _Rule(r"ssm\.(time_step_rank|group_count|conv_kernel)|full_attention_interval", 1, MAX_HEADS),
    _Rule(r"ssm\.(inner|state)_size", 1, MAX_WIDTH),
    _Rule(r"head_dim|d_kv|attention\.(key|value)_length(_mla)?", 1, MAX_HEAD_DIM),
    _Rule(r"(kv|q)_lora_rank|qk_(nope|rope)_head_dim|v_head_dim|attention\.kv_lora_rank", 0, MAX_HEAD_DIM),
    _Rule(r"n_(routed|shared)_experts|n_group|topk_group|first_k_dense_replace", 0, MAX_EXPERTS),
    _Rule(r"expert_(shared|group|group_used)_count|leading_dense_block_count", 0, MAX_EXPERTS),
    _Rule(r"nextn_predict_layers", 0, MAX_LAYERS),
    _Rule(r"vocab_size", 1, MAX_VOCAB),
    _Rule(r"(moe_)?intermediate_size|(dense_)?ffn_dim|n_inner|d_ff|hidden_dim|.*feed_forward_length", 0, MAX_WIDTH),
    _Rule(r"hidden_size|n_embd|d_model|dim|embedding_length|word_embed_proj_dim", 1, MAX_WIDTH),
    _Rule(r"max_position_embeddings|n_positions|n_ctx|context_length", 1, MAX_POSITIONS),
    _Rule(r"original_max_position_embeddings|rope\.scaling\.original_context_length", 1, MAX_POSITIONS),
    _Rule(r"num_(local_)?experts|num_experts_per_tok|expert_(used_)?count", 0, MAX_EXPERTS),
    _Rule(r"(rms_norm|layer_norm|norm)_(eps|epsilon)|attention\.layer_norm_(rms_)?epsilon", _TINY, 1),
    _Rule(r"rope_theta|rotary_emb_base|rope_local_base_freq|rope\.freq_base(_swa)?", 1 + 1e-6, MAX_MAGNITUDE),
    _Rule(r"partial_rotary_factor|rotary_pct", _TINY, 1),
    _Rule(r"beta_(fast|slow)|rope\.scaling\.yarn_beta_(fast|slow)", _TINY, MAX_MAGNITUDE),
    _Rule(r"(low|high)_freq_factor|attention_factor|factor|rope\.scaling\.attn_factor", _TINY, MAX_MAGNITUDE),
    _Rule(r"rope\.(scaling\.factor|scale_linear)", 0, MAX_MAGNITUDE),  # 0: none
    _Rule(r"query_pre_attn_scalar", _TINY, MAX_MAGNITUDE),
    _Rule(r"(embedding|residual|attention)_multiplier|logits_scaling", -MAX_MAGNITUDE, MAX_MAGNITUDE),
    _Rule(r"(embedding|residual|logit)_scale|attention\.scale", -MAX_MAGNITUDE, MAX_MAGNITUDE),
    _Rule(
        r"(relative_attention|attention\.relative)_(num_)?buckets(_count)?|relative_attention_max_distance", 1, 65_536
    ),
]
_COMPILED = [(re.compile(rule.pattern), rule) for rule in _RULES]


def check_numbers(values: Mapping[str, Any], *, prefix: str = "") -> None:
    """See that every number of a configuration is one, and is in the bounds of its kind.

    Args:
        values: The object of a ``config.json``, or a GGUF file's metadata.
        prefix: Only keys that begin so are looked at; the rest of them names the kind.

    Raises:
        InvalidInputError: a number is not finite, of no use, or larger than any model's; the message names the key.

    Example:
        >>> check_numbers({"num_hidden_layers": 30, "rms_norm_eps": 1e-5})
        >>> check_numbers({"num_attention_heads": 0})
        Traceback (most recent call last):
        mlsys_core.errors.InvalidInputError: the configuration has num_attention_heads = 0; it must be from 1 to 65536
    """
    for key, value in values.items():
        if not key.startswith(prefix):
            continue
        if isinstance(value, Mapping):
            check_numbers(value)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, Mapping):
                    check_numbers(item)
                else:
                    _check_finite(key, item)
        else:
            _check(key, key.removeprefix(prefix), value)


def _check(key: str, kind: str, value: object) -> None:
    _check_finite(key, value)
    for pattern, rule in _COMPILED:
        if pattern.fullmatch(kind):
            if value is not None and not isinstance(value, int | float):
                raise InvalidInputError(f"the configuration has {key} = {_shown(value)}; it must be a number")
            if isinstance(value, int | float) and not rule.least <= value <= rule.most:
                least = 0 if 0 < rule.least <= _TINY else rule.least
                raise InvalidInputError(
                    f"the configuration has {key} = {_shown(value)}; it must be "
                    f"{'above' if least != rule.least else 'from'} {least:g} "
                    f"{'and at most' if least != rule.least else 'to'} {rule.most:.15g}"
                )
            return


def _check_finite(key: str, value: object) -> None:
    if isinstance(value, int | float) and not (
        abs(value) <= MAX_MAGNITUDE if isinstance(value, int) else math.isfinite(value)
    ):
        raise InvalidInputError(
            f"the configuration has {key} = {_shown(value)}, which is no number that could be meant"
        )


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > MAX_MAGNITUDE:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:60]
