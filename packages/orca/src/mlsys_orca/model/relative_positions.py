"""T5's relative positions: a learned number per head and bucket of distances, spread out by distance.

From here the numbers go to :class:`~mlsys_orca.model.attention.AttentionOptions` as its ``bias``.
Source: Raffel et al., 2020, section 2.1.
"""

from __future__ import annotations

import math

import torch
from mlsys_orca.model.config import RelativePositions
from torch import Tensor


def bias_by_distance(table: Tensor, positions: RelativePositions, *, is_causal: bool) -> Tensor:
    """Return the bias of each head's scores, by distance.

    Args:
        table: [num_buckets, num_heads], as it was learned.
        positions: Rule by which distances fall into buckets.
        is_causal: True if keys lie on one side of a row only, which has all buckets then.

    Returns:
        fp32 [num_heads, 2 * max_distance + 1], by the key's position less the row's, from ``-max_distance`` on.

    Example:
        >>> table = torch.arange(8.0)[:, None]
        >>> bias_by_distance(table, RelativePositions(num_buckets=8, max_distance=5), is_causal=True)[0].int().tolist()
        [7, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0]
        >>> bias_by_distance(table, RelativePositions(num_buckets=8, max_distance=5), is_causal=False)[0].int().tolist()
        [3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7]
    """
    reach = positions.max_distance
    distances = torch.arange(-reach, reach + 1)
    num_buckets = positions.num_buckets if is_causal else positions.num_buckets // 2  # on the row's one side, or each
    lengths = (-distances).clamp(min=0) if is_causal else distances.abs()
    buckets = _buckets(lengths, num_buckets, reach)
    if not is_causal:
        buckets += num_buckets * (distances > 0)
    return table.float()[buckets.to(table.device)].T.contiguous()


def _buckets(lengths: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each length: half hold one length each, the others stretches on a logarithmic scale."""
    num_exact = num_buckets // 2
    # In fp32 and in this order, as the models were trained: another rounding moves a stretch's end by one.
    stretches = torch.log(lengths.clamp(min=1).float() / num_exact) / math.log(max_distance / num_exact)
    wide = num_exact + (stretches * (num_buckets - num_exact)).long()
    return torch.where(lengths < num_exact, lengths, wide.clamp(max=num_buckets - 1))
