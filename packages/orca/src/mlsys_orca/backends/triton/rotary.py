"""Kernel between projection and attention: normalise heads, turn them, write keys and values to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _prepare(
    qkv: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """Prepare one token's query heads that share a key head, that key head, and its value head."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    dtype: tl.constexpr = qkv.dtype.element_ty
    in_row = qkv + token * (num_heads + 2 * NUM_KV_HEADS) * HEAD_DIM
    in_cache = (tl.load(slots + token) * NUM_KV_HEADS + kv_head) * HEAD_DIM

    h = tl.arange(0, BLOCK_HEADS)
    is_query, is_key = (h < GROUP)[:, None], (h == GROUP)[:, None]  # the key head stands below its queries
    head = tl.where(h < GROUP, kv_head * GROUP + h, num_heads + kv_head)[:, None]
    source = in_row + head * HEAD_DIM

    # Features of a head: two halves that turn with each other, and a rest that does not turn.
    i, r = tl.arange(0, BLOCK_HALF)[None, :], tl.arange(0, BLOCK_REST)[None, :]
    is_half, is_rest = i < HALF, r < HEAD_DIM - 2 * HALF
    is_read = is_query | is_key
    first = tl.load(source + i, mask=is_read & is_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + i, mask=is_read & is_half, other=0.0).to(tl.float32)
    rest = tl.load(source + 2 * HALF + r, mask=is_read & is_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        scale = weight + head * HEAD_DIM
        # Rounded as if stored before they turn, which is what the model was trained with.
        first = first * factor * tl.load(scale + i, mask=is_read & is_half, other=0.0)
        first = first.to(dtype).to(tl.float32)
        second = second * factor * tl.load(scale + HALF + i, mask=is_read & is_half, other=0.0)
        second = second.to(dtype).to(tl.float32)
        rest = rest * factor * tl.load(scale + 2 * HALF + r, mask=is_read & is_rest, other=0.0)
    if HALF > 0:
        c = tl.load(cos + token * 2 * HALF + HALF + i, mask=is_half, other=0.0)
        s = tl.load(sin + token * 2 * HALF + HALF + i, mask=is_half, other=0.0)
        first, second = first * c - second * s, second * c + first * s

    if HALF > 0 or HAS_NORM:
        target = query + (token * num_heads + head) * HEAD_DIM
        tl.store(target + i, first.to(dtype), mask=is_query & is_half)
        tl.store(target + HALF + i, second.to(dtype), mask=is_query & is_half)
        tl.store(target + 2 * HALF + r, rest.to(dtype), mask=is_query & is_rest)
    target = keys + in_cache + h[:, None] * 0
    tl.store(target + i, first.to(dtype), mask=is_key & is_half)
    tl.store(target + HALF + i, second.to(dtype), mask=is_key & is_half)
    tl.store(target + 2 * HALF + r, rest.to(dtype), mask=is_key & is_rest)

    d = tl.arange(0, BLOCK_DIM)
    value = tl.load(in_row + (num_heads + NUM_KV_HEADS + kv_head) * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
    tl.store(values + in_cache + d, value, mask=d < HEAD_DIM)


def prepare_heads(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Normalise and turn queries and keys, and write keys and values to the cache.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim] contiguous: queries, keys, values.
        keys: One layer's cache, [num_slots, num_kv_heads, head_dim], of the same dtype.
        values: Like ``keys``.
        slots: [num_tokens] int64, where each row's key and value go.
        num_heads: Query heads.
        rotary: Factors of :class:`mlsys_orca.model.layers.Rotary`; None: nothing turns.
        norm_weight: [num_heads + num_kv_heads, head_dim] fp32, of an RMSNorm over each head; None: no norm.
        eps: Added to that norm's mean square.

    Returns:
        The queries, [num_tokens, num_heads, head_dim]: those of ``qkv`` where there was nothing to do to them.
    """
    num_tokens, _, head_dim = qkv.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    half = 0 if rotary is None else rotary[0].shape[-1] // 2
    cos, sin = (qkv, qkv) if rotary is None else rotary
    query = qkv[:, :num_heads]
    if rotary is not None or norm_weight is not None:
        query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _prepare[num_tokens, num_kv_heads](
        qkv,
        query,
        keys,
        values,
        slots,
        cos,
        sin,
        qkv if norm_weight is None else norm_weight,
        eps,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HEADS=triton.next_power_of_2(group + 1),
        BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        HAS_NORM=norm_weight is not None,
        num_warps=1 if group < 4 else 4,
    )
    return query
