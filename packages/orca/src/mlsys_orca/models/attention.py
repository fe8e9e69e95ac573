"""Attention over a ragged batch: the one operator that must know which rows are whose (ORCA, section 3.2).

Called by every model family once per layer, after the layer's keys and values are written to the cache. Requests are
processed one by one with torch's scaled dot-product attention; a kernel for the whole ragged batch can take this
function's place, since everything it needs is in its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mlsys_orca.models.decoder import AttentionSpan


def ragged_attention(query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[AttentionSpan]) -> Tensor:
    """Causal attention of each request's rows over its own keys and values.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated.
        keys: One layer's cache, [num_slots, num_kv_heads, head_dim], rotated; this iteration's keys already written.
        values: As ``keys``.
        spans: The requests; together they cover every row.

    Returns:
        [num_tokens, num_heads * head_dim], heads beside each other.

    Example:
        >>> query, cache = torch.ones(3, 4, 8), torch.ones(16, 2, 8)
        >>> spans = [AttentionSpan(0, 2, 2, slice(0, 2)), AttentionSpan(2, 3, 5, slice(8, 13))]
        >>> ragged_attention(query, cache, cache, spans).shape
        torch.Size([3, 32])
    """
    merged = torch.empty_like(query)
    for span in spans:
        rows = query[span.start : span.stop]
        merged[span.start : span.stop] = _attend(rows, keys[span.slots], values[span.slots])
    return merged.flatten(1)


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One request: ``query`` [n, num_heads, head_dim], ``keys`` and ``values`` [context, num_kv_heads, head_dim]."""
    num_rows, num_heads, head_dim = query.shape
    context_len, num_kv_heads, _ = keys.shape
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    if num_rows == 1:
        # The heads that share a key stand as rows against it, so no key is repeated and no mask is needed.
        grouped = query.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        return scaled_dot_product_attention(grouped, k, v).view(1, num_heads, head_dim)
    q = query.transpose(0, 1)[None]
    if num_rows == context_len:
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:  # a later chunk of a prompt: row i sees the earlier context and i + 1 of its own chunk
        seen = torch.ones(num_rows, context_len, dtype=torch.bool, device=query.device).tril(context_len - num_rows)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return attended[0].transpose(0, 1)
