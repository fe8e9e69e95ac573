"""LambdaRank's loss and NDCG of whole queries; targets are ``[rows, 2]``: relevance, and the number of the query."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

MOST_PAIRS = 4_000_000  # compared at once


def lambda_rank(margin: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each row, ``[rows]``.

    The logistic losses of its pairs with less relevant rows of its query, each weighed by how far NDCG changes where
    the two change places.
    """
    losses = torch.zeros(len(margin), dtype=margin.dtype, device=margin.device)
    for rows, is_row in _tables(target[:, 1]):
        score, gain = margin[rows, 0], (2.0 ** target[rows, 0].to(margin.dtype) - 1) * is_row
        with torch.no_grad():
            discount = _discounts(torch.where(is_row, score, -torch.inf))
            best = _best(gain).clamp(min=1e-12)
            change = (gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])
            weight = change.abs() / best[:, None, None] * (gain[:, :, None] > gain[:, None])
            weight = weight * (is_row[:, :, None] & is_row[:, None])
        pairs = functional.softplus(score[:, None] - score[:, :, None]) * weight
        losses = losses.index_add(0, rows[is_row], pairs.sum(dim=2)[is_row])
    return losses


def ndcg(margin: Tensor, target: Tensor) -> Tensor:
    """Return the NDCG of each row's query, ``[rows]``; 1 where no row of a query is relevant."""
    found = torch.ones(len(margin), dtype=torch.float64, device=margin.device)
    for rows, is_row in _tables(target[:, 1]):
        gain = (2.0 ** target[rows, 0].double() - 1) * is_row
        score = torch.where(is_row, margin[rows, 0].double(), -torch.inf)
        best = _best(gain)
        value = torch.where(best > 0, (gain * _discounts(score)).sum(dim=1) / best.clamp(min=1e-12), 1.0)
        found[rows[is_row]] = value[:, None].expand(rows.shape)[is_row]
    return found


def _tables(query: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield queries side by side: indices of rows ``[queries, longest]``, and which of them are rows."""
    order = query.argsort(stable=True)
    _, counts = torch.unique_consecutive(query[order], return_counts=True)
    starts = counts.cumsum(0) - counts
    by_size = counts.argsort(descending=True)  # queries of like sizes together
    at = 0
    while at < len(by_size):
        longest = int(counts[by_size[at]])
        chosen = by_size[at : at + max(1, MOST_PAIRS // longest**2)]
        column = torch.arange(longest, device=query.device)
        is_row = column < counts[chosen, None]
        yield order[(starts[chosen, None] + column).clamp(max=len(order) - 1)], is_row
        at += len(chosen)


def _discounts(score: Tensor) -> Tensor:
    """Return the discount of each place that scores ``[queries, longest]`` put rows in."""
    rank = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return 1 / torch.log2(rank.to(score.dtype) + 2)


def _best(gain: Tensor) -> Tensor:
    """Return the highest sum of discounted gains, ``[queries]``."""
    ordered = gain.sort(dim=1, descending=True).values
    return (ordered * _discounts(ordered)).sum(dim=1)
