"""Pooling of last hidden states to one vector a request: padded rows, or the tokens of all requests in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _mean(hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    return (hidden * mask).sum(1) / lengths


def _weighted(hidden: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    weights = mask * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
    return (hidden * weights).sum(1) / weights.sum(1)


def _last(hidden: Tensor, _: Tensor, lengths: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths[:, 0].long() - 1]


# Of hidden [requests, tokens, features], mask [requests, tokens, 1] and lengths [requests, 1]; in the order of results.
POOLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cls": lambda hidden, _, __: hidden[:, 0],
    "max": lambda hidden, mask, _: hidden.masked_fill(~mask, -torch.inf).amax(1),
    "mean": _mean,
    "mean_sqrt_len_tokens": lambda hidden, mask, lengths: (hidden * mask).sum(1) / lengths.sqrt(),
    "weightedmean": _weighted,
    "lasttoken": _last,
}


def pool_padded(poolings: Sequence[str], hidden: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return a vector of each request, [requests, features of all poolings].

    Args:
        poolings: Names of :data:`POOLINGS`; their vectors are put one after another.
        hidden: Last hidden states, [requests, tokens, features].
        mask: True where there is a token, [requests, tokens].
        lengths: Tokens of each request, [requests].
    """
    parts = [POOLINGS[name](hidden, mask[..., None], lengths[:, None]) for name in poolings]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def pool_packed(poolings: Sequence[str], hidden: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return a vector of each request, [requests, features of all poolings].

    Args:
        poolings: Names of :data:`POOLINGS`.
        hidden: Last hidden states of all requests, one after another, [tokens, features].
        lengths: Tokens of each request.
    """
    counts = torch.tensor(lengths, device=hidden.device)
    ends = counts.cumsum(0)
    parts = [_packed(name, hidden, counts, ends) for name in poolings]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _packed(name: str, hidden: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
    if name == "cls":
        return hidden[ends - counts]
    if name == "lasttoken":
        return hidden[ends - 1]
    if name == "max":
        return torch.segment_reduce(hidden, "max", lengths=counts)
    if name == "weightedmean":
        starts = torch.repeat_interleave(ends - counts, counts)
        weights = (torch.arange(1, len(hidden) + 1, device=hidden.device) - starts)[:, None]
        whole = torch.segment_reduce(hidden * weights, "sum", lengths=counts)
        return whole / (counts * (counts + 1) / 2)[:, None]
    whole = torch.segment_reduce(hidden, "sum", lengths=counts)
    return whole / (counts if name == "mean" else counts.sqrt())[:, None]
