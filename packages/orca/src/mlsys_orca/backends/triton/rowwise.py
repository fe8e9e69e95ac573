"""Kernels of rows between the products: norms, activations and gates, and the heads on their way to attention.

A program computes one row or a part of one, so a row's result does not depend on the rows beside it. Norms are fused
with the addition before and the rounding after them; heads are normalised, turned and written to the cache in one
kernel. An MLP's first bias is no part of it: cuBLAS adds that while it still has the sums in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

_BLOCK = 1024  # features per program


@triton.jit
def _activate(x: tl.tensor, NAME: tl.constexpr) -> tl.tensor:
    """Return the activation of ``x`` fp32, by the names of ``layers.ACTIVATIONS``."""
    if NAME == "silu":
        return x * tl.sigmoid(x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":  # 0.5 (1 + tanh(y)) is sigmoid(2 y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(NAME == "relu")
        return tl.maximum(x, 0.0)


@triton.jit
def _plain(x: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, NAME: tl.constexpr) -> None:
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = x + tl.program_id(0).to(tl.int64) * SIZE + i
    state = tl.load(at, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(at, _activate(state, NAME).to(x.dtype.element_ty), mask=i < SIZE)


@triton.jit
def _gated(x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, NAME: tl.constexpr) -> None:
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, (_activate(gate, NAME) * up).to(out.dtype.element_ty), mask=i < SIZE)


def activate(x: Tensor, *, activation: str) -> Tensor:
    """Replace ``x`` by ``activation(x)`` in place.

    Args:
        x: [num_tokens, intermediate_size] contiguous; overwritten.
        activation: A name of ``layers.ACTIVATIONS``.

    Returns:
        ``x``.
    """
    num_tokens, size = x.shape
    _plain[num_tokens, triton.cdiv(size, _BLOCK)](x, SIZE=size, BLOCK=_BLOCK, NAME=activation)
    return x


def gated(gate_up: Tensor, *, activation: str) -> Tensor:
    """Return ``activation(gate) * up``, rounded once.

    Args:
        gate_up: [num_tokens, 2 * intermediate_size] contiguous, gates first.
        activation: A name of ``layers.ACTIVATIONS``.

    Returns:
        [num_tokens, intermediate_size].
    """
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    _gated[num_tokens, triton.cdiv(size, _BLOCK)](gate_up, out, SIZE=size, BLOCK=_BLOCK, NAME=activation)
    return out


@triton.jit
def _add_norm(
    x: tl.tensor,
    branch: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    is_in = i < SIZE
    state = tl.load(x + row + i, mask=is_in, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        state += tl.load(branch + row + i, mask=is_in, other=0.0).to(tl.float32)
        tl.store(x + row + i, state, mask=is_in)
    if IS_CENTRED:
        state = tl.where(is_in, state - tl.sum(state, 0) / SIZE, 0.0)
    result = state * tl.rsqrt(tl.sum(state * state, 0) / SIZE + eps)
    if HAS_WEIGHT:
        result *= tl.load(weight + i, mask=is_in, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + i, mask=is_in, other=0.0)
    tl.store(out + row + i, result.to(out.dtype.element_ty), mask=is_in)


def add_norm(
    x: Tensor,
    branch: Tensor | None,
    *,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float,
    is_centred: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Add ``branch`` to ``x``, where it stands, and normalise the sum.

    Args:
        x: [num_tokens, hidden_size] contiguous; fp32 and overwritten where there is a branch.
        branch: The same shape, contiguous, any floating dtype; None: nothing is added.
        weight: [hidden_size] fp32 that scales; None: no scale.
        bias: [hidden_size] fp32 that shifts; None: no shift.
        eps: Added to the mean square, or to the variance.
        is_centred: LayerNorm; False: RMSNorm.
        dtype: Dtype of the result.

    Returns:
        [num_tokens, hidden_size] in ``dtype``.
    """
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, size, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _add_norm[num_tokens,](
        x,
        x if branch is None else branch,
        x if weight is None else weight,
        x if bias is None else bias,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_BRANCH=branch is not None,
        IS_CENTRED=is_centred,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out


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
