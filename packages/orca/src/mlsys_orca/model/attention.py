"""Attention over a ragged batch: the one operator that must know which rows are whose (ORCA, section 3.2).

Called by every model family once per layer, after the layer's keys and values are written to the cache. Requests are
processed one by one with torch's scaled dot-product attention; a kernel for the whole ragged batch can take this
function's place, since everything it needs is in its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.model.decoder import AttentionSpan
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Options of a layer's attention. Owner: the layer, for good."""

    scale: float | None = None  # multiplies the scores; None: head_dim ** -0.5
    softcap: float | None = None  # scaled scores become softcap * tanh(score / softcap); None: as they are
    window: int | None = None  # keys that a row sees, its own and those right before it; None: all before it
    sinks: Tensor | None = field(default=None, compare=False)  # [num_heads] a score more, of a key whose value is 0
    is_causal: bool = True  # False: every row sees all keys of its request, and there is no window
    # [num_heads, 2 * reach + 1] added to the scores, by the key's position less the row's, from -reach to reach; what
    # is further away gets the number at that end. None: nothing is added.
    bias: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.window is not None and not self.is_causal:
            raise InvalidInputError("a window counts the keys before a row, so attention that has one is causal")


_PLAIN = AttentionOptions()


def ragged_attention(
    query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[AttentionSpan], options: AttentionOptions = _PLAIN
) -> Tensor:
    """Attend with each request's rows to its own keys and values, causal unless the options say otherwise.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated.
        keys: One layer's cache, [num_slots, num_kv_heads, head_dim], rotated; this iteration's keys already written.
            Or any other matrix of keys that the spans' slots point into.
        values: Like ``keys``.
        spans: The requests; together they cover every row.
        options: The layer's scale, soft cap, window and bias, and which keys a row sees.

    Returns:
        [num_tokens, num_heads * head_dim], heads beside each other.

    Example:
        >>> query, cache = torch.ones(3, 4, 8), torch.ones(16, 2, 8)
        >>> spans = [AttentionSpan(0, 2, 2, slice(0, 2)), AttentionSpan(2, 3, 5, slice(8, 13))]
        >>> ragged_attention(query, cache, cache, spans).shape
        torch.Size([3, 32])
    """
    attend = _attend if options.softcap is None and options.sinks is None else _attend_written_out
    merged = torch.empty_like(query)
    for span in spans:
        slots = span.slots if options.window is None else _slots_in_window(span, options.window)
        rows = query[span.start : span.stop]
        merged[span.start : span.stop] = attend(rows, keys[slots], values[slots], options)
    return merged.flatten(1)


def _slots_in_window(span: AttentionSpan, window: int) -> slice | Tensor:
    """Return the slots that any row of ``span`` sees: those its first row sees, and what follows."""
    num_hidden = span.context_len - (span.stop - span.start) + 1 - window
    if num_hidden <= 0:
        return span.slots
    if isinstance(span.slots, slice):
        return slice(span.slots.start + num_hidden, span.slots.stop)
    return span.slots[num_hidden:]


def _attend(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attend for one request.

    Shapes: ``query`` [n, num_heads, head_dim], ``keys`` and ``values`` [context, num_kv_heads, head_dim].
    """
    num_rows, num_heads, head_dim = query.shape
    context_len, num_kv_heads, _ = keys.shape
    k, v = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    mask = _mask(num_rows, context_len, options, query)
    if num_rows == 1:
        # The heads that share a key stand as rows against it, so no key is repeated.
        group = num_heads // num_kv_heads
        grouped = query.reshape(1, num_kv_heads, group, head_dim)
        mask = None if mask is None else mask.view(1, num_kv_heads, group, context_len)
        attended = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=options.scale)
        return attended.reshape(1, num_heads, head_dim)  # a view on a CPU; CUDA's kernels lay it out otherwise
    q, is_causal = query.transpose(0, 1)[None], mask is None and options.is_causal
    attended = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=options.scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _attend_written_out(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attend like :func:`_attend`, with a soft cap or sinks, which torch's operator has not."""
    num_rows, num_heads, head_dim = query.shape
    context_len, num_kv_heads, _ = keys.shape
    scale, cap = options.scale or head_dim**-0.5, options.softcap
    grouped = query.reshape(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [kv heads, group, rows, dim]
    scores = (grouped @ keys.permute(1, 2, 0)[:, None]).float()
    scores = scores.mul_(scale) if cap is None else scores.mul_(scale / cap).tanh_().mul_(cap)
    if (bias := _biases(options, num_rows, context_len, query.device)) is not None:
        scores += bias.view(scores.shape)
    if options.is_causal and num_rows > 1:
        scores.masked_fill_(~_seen(num_rows, context_len, options.window, query.device), -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    attended = weights.to(values.dtype) @ values.transpose(0, 1)[:, None]
    return attended.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)


def _mask(num_rows: int, context_len: int, options: AttentionOptions, query: Tensor) -> Tensor | None:
    """Return the mask for torch's operator beside "causal": None, the keys a row sees, or biases of the scores."""
    window, is_causal = options.window, options.is_causal and num_rows > 1
    mask = _biases(options, num_rows, context_len, query.device)
    if mask is None:
        is_told = not is_causal or (num_rows == context_len and (window is None or context_len <= window))
        return None if is_told else _seen(num_rows, context_len, window, query.device)
    if is_causal:
        mask.masked_fill_(~_seen(num_rows, context_len, window, query.device), -torch.inf)
    return mask.to(query.dtype)


def _biases(options: AttentionOptions, num_rows: int, context_len: int, device: torch.device) -> Tensor | None:
    """Return what the distance adds to scores as a new tensor [num_heads, num_rows, context_len]; None: nothing."""
    if options.bias is None:
        return None
    positions = torch.arange(context_len, device=device)
    distances = positions - positions[context_len - num_rows :, None]
    reach = options.bias.shape[1] // 2
    return options.bias[:, distances.clamp_(-reach, reach).add_(reach)]


def _seen(num_rows: int, context_len: int, window: int | None, device: torch.device) -> Tensor:
    """Return the keys each row sees, bool [num_rows, context_len]: up to its own position, the last ``window``."""
    seen = torch.ones(num_rows, context_len, dtype=torch.bool, device=device).tril_(context_len - num_rows)
    return seen if window is None else seen.triu_(context_len - num_rows - window + 1)
