"""Attention of a whole ragged batch in one launch: prefill, decode and chunks mixed, over paged keys and values.

The thread blocks of all requests' attention stand one after the other in one grid (dissertation, section 4.4),
however long each lives. What a program computes is an item of
:class:`~mlsys_orca.backends.triton.plan.AttentionPlan`. Scores, softmax (online; Milakov and Gimelshein, 2018; Dao et
al., 2022) and the weighted sum of values stay in registers, in fp32; fp32 inputs are multiplied in full precision,
never as TF32.
"""

from __future__ import annotations

from typing import Any

import torch
from mlsys_orca.backends.triton.batch import RaggedBatch
from mlsys_orca.backends.triton.plan import ITEM_FIELDS, MERGE_FIELDS
from mlsys_orca.model.attention import AttentionOptions
from torch import Tensor

import triton
import triton.language as tl
from triton import knobs

_LOG2_E = 1.4426950408889634  # the GPU's exponential is of base 2
_PLAIN = AttentionOptions()


@triton.jit
def _merge(
    top: tl.tensor,
    total: tl.tensor,
    summed: tl.tensor,
    new_top: tl.tensor,
    new_total: tl.tensor,
    new_summed: tl.tensor,
) -> tl.tuple:
    """Merge the softmax over two sets of keys: largest score, sum of weights, weighted sum of values of both."""
    larger = tl.maximum(top, new_top)
    reference = tl.where(larger == float("-inf"), 0.0, larger)
    keep, take = tl.exp2(top - reference), tl.exp2(new_top - reference)
    # The fused multiply-add is spelled out: both kernels that merge must round alike.
    total = tl.fma(total, keep, new_total * take)
    summed = tl.fma(summed, tl.broadcast_to(keep[:, None], summed.shape), new_summed * take[:, None])
    return larger, total, summed


@triton.autotune(
    # Of what leaves the arithmetic alone: a tuner that chose tile sizes or warps would choose roundings too.
    configs=[triton.Config({}, num_warps=4, num_stages=n) for n in ((1,) if knobs.runtime.interpret else (1, 2, 3))],
    key=["HEAD_DIM"],
)
@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_stats: tl.tensor,
    items: tl.tensor,
    block_tables: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    item = items + tl.program_id(0) * FIELDS
    request, row, num_rows, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first_key, stop_key, partial_row = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    kv_head = tl.program_id(1)

    # Row m of the tile is query m // GROUP with the m % GROUP-th of the heads that share this key head.
    m = tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_DIM)
    n = tl.arange(0, BLOCK_KEYS)
    is_row, is_dim = m // GROUP < num_rows, d < HEAD_DIM
    own = tl.minimum(m // GROUP, num_rows - 1)
    head = kv_head * GROUP + m % GROUP
    q_at = (row + own).to(tl.int64) * query_stride + head * HEAD_DIM
    q = tl.load(query + q_at[:, None] + d[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    at = position + own  # each row's position
    lowest = first_key
    if WINDOW > 0:
        lowest = tl.maximum(first_key, position + 1 - WINDOW)

    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    summed = tl.full([BLOCK_ROWS, BLOCK_DIM], 0.0, tl.float32)
    for split in range(lowest // SPLIT_KEYS * SPLIT_KEYS, stop_key, SPLIT_KEYS):
        split_top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        split_total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
        split_summed = tl.full([BLOCK_ROWS, BLOCK_DIM], 0.0, tl.float32)
        begin = tl.maximum(split, lowest // BLOCK_KEYS * BLOCK_KEYS)
        for step in range(begin, tl.minimum(split + SPLIT_KEYS, stop_key), BLOCK_KEYS):
            key = step + n
            is_key = key < stop_key
            block = tl.load(block_tables + request * table_stride + key // BLOCK_SIZE, mask=is_key, other=0)
            slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
            kv_at = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
            is_kv = is_key[:, None] & is_dim[None, :]
            k = tl.load(keys + kv_at, mask=is_kv, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))  # tanh: scale has the factor 2 log2(e)
            is_seen = is_key[None, :]
            if IS_CAUSAL:
                is_seen = is_seen & (key[None, :] <= at[:, None])
            if WINDOW > 0:
                is_seen = is_seen & (key[None, :] + WINDOW > at[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))

            larger = tl.maximum(split_top, tl.max(scores, 1))
            reference = tl.where(larger == float("-inf"), 0.0, larger)
            weights = tl.exp2(scores - reference[:, None])
            keep = tl.exp2(split_top - reference)
            v = tl.load(values + kv_at, mask=is_kv, other=0.0)
            split_total = split_total * keep + tl.sum(weights, 1)
            split_summed = tl.dot(weights.to(v.dtype), v, split_summed * keep[:, None], input_precision="ieee")
            split_top = larger
        top, total, summed = _merge(top, total, summed, split_top, split_total, split_summed)

    is_out = is_row[:, None] & is_dim[None, :]
    if partial_row < 0:
        out_at = ((row + own).to(tl.int64) * NUM_KV_HEADS * GROUP + head) * HEAD_DIM
        result = (summed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + d[None, :], result, mask=is_out)
    else:
        to = (partial_row + own).to(tl.int64) * NUM_KV_HEADS * GROUP + head
        tl.store(partial_stats + to * 2, top, mask=is_row)
        tl.store(partial_stats + to * 2 + 1, total, mask=is_row)
        tl.store(partial + to[:, None] * HEAD_DIM + d[None, :], summed, mask=is_out)


@triton.jit
def _merge_splits(
    out: tl.tensor,
    partial: tl.tensor,
    partial_stats: tl.tensor,
    merges: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    merge = merges + tl.program_id(0) * FIELDS
    row, num_visible, partial_row, stride = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)
    g, d = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_DIM)
    is_head = g < GROUP
    is_out = is_head[:, None] & (d < HEAD_DIM)[None, :]
    head = tl.program_id(1) * GROUP + g
    first = 0
    if WINDOW > 0:
        first = tl.maximum(num_visible - WINDOW, 0) // SPLIT_KEYS

    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.full([BLOCK_GROUP], 0.0, tl.float32)
    summed = tl.full([BLOCK_GROUP, BLOCK_DIM], 0.0, tl.float32)
    for split in range(first, (num_visible + SPLIT_KEYS - 1) // SPLIT_KEYS):
        source = (partial_row + split * stride).to(tl.int64) * NUM_KV_HEADS * GROUP + head
        split_top = tl.load(partial_stats + source * 2, mask=is_head, other=0.0)
        split_total = tl.load(partial_stats + source * 2 + 1, mask=is_head, other=1.0)
        split_summed = tl.load(partial + source[:, None] * HEAD_DIM + d[None, :], mask=is_out, other=0.0)
        top, total, summed = _merge(top, total, summed, split_top, split_total, split_summed)
    out_at = (row.to(tl.int64) * NUM_KV_HEADS * GROUP + head) * HEAD_DIM
    result = (summed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at[:, None] + d[None, :], result, mask=is_out)


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, options: AttentionOptions = _PLAIN
) -> Tensor:
    """Return the attention of each request's rows over its keys and values, as ``models.attention.ragged_attention``.

    A row's result is bit for bit the same in every batch, and however its prompt was cut into chunks.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated; rows may stand apart, a row's heads may not.
        keys: One layer's cache, [num_slots, num_kv_heads, head_dim], rotated; this iteration's keys already written.
        values: Like ``keys``.
        batch: The requests, and how they are cut, which is for attention of this layer's causality.
        options: The layer's scale, soft cap and window, and whether it is causal. It has no bias.

    Returns:
        [num_tokens, num_heads * head_dim] in the query's dtype, heads beside each other.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, tile = keys.shape[1], batch.tile
    scale = head_dim**-0.5 if options.scale is None else options.scale
    per_exponent = _LOG2_E if options.softcap is None else 2 * _LOG2_E / options.softcap
    cap = 0.0 if options.softcap is None else options.softcap * _LOG2_E
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=query.dtype, device=query.device)
    partial = torch.empty(batch.num_partial_rows, num_heads, head_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(batch.num_partial_rows, num_heads, 2, dtype=torch.float32, device=query.device)
    shape: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": tile.group,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(head_dim)),
        "SPLIT_KEYS": tile.split_keys,
        "WINDOW": options.window or 0,
    }
    _attend[len(batch.items), num_kv_heads](
        query,
        keys,
        values,
        out,
        partial,
        stats,
        batch.items,
        batch.block_tables,
        batch.block_tables.stride(0),
        query.stride(0),
        scale * per_exponent,
        cap,
        BLOCK_ROWS=tile.num_rows,
        BLOCK_KEYS=tile.num_keys,
        BLOCK_SIZE=batch.block_size,
        HAS_SOFTCAP=options.softcap is not None,
        IS_CAUSAL=options.is_causal,
        FIELDS=ITEM_FIELDS,
        **shape,
    )
    if len(batch.merges):
        _merge_splits[len(batch.merges), num_kv_heads](
            out,
            partial,
            stats,
            batch.merges,
            BLOCK_GROUP=triton.next_power_of_2(tile.group),
            FIELDS=MERGE_FIELDS,
            num_warps=1,
            **shape,
        )
    return out
