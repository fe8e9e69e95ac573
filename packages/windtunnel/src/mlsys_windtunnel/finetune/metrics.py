"""Metrics that choose the best epoch: scikit-learn's names, larger is better, and how sure a difference is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor
from torch.nn import functional

from mlsys_windtunnel.finetune.losses import is_classifier, log_loss
from mlsys_windtunnel.modules.base import PredictorModule

Floats = npt.NDArray[np.float64]
RowScores = Callable[[Tensor, Tensor, Tensor], Floats]  # margins, targets, weights to [rows]
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


@dataclass(frozen=True, slots=True)
class Metric:
    """A score that is a mean over rows; for the AUC, of either class."""

    name: str
    row_scores: RowScores
    is_by_class: bool = False  # whether the score is the mean over the rows of each class
    is_by_query: bool = False  # whether all rows of a query have its score

    def __call__(self, margin: Tensor, target: Tensor, weight: Tensor) -> float:
        """Return the score of margins ``[rows, k]``."""
        chosen = self._strata(target)[-1]
        return float(np.average(self.row_scores(margin, target, weight)[chosen], weights=_floats(weight)[chosen]))

    def gain(self, before: Tensor, after: Tensor, target: Tensor, weight: Tensor) -> tuple[float, float]:
        """Return how far ``after`` scores above ``before`` on the same rows, and the standard error of that.

        Rows are paired: each has a difference of its own, and the error follows from how these scatter. For the AUC
        this is the estimate of DeLong, DeLong and Clarke-Pearson (1988).
        """
        of_row = self.row_scores(after, target, weight) - self.row_scores(before, target, weight)
        weights = _floats(weight)
        variance = 0.0
        for chosen in self._strata(target):
            difference, share = of_row[chosen], weights[chosen] / weights[chosen].sum()
            mean = float(share @ difference)
            count = int(np.count_nonzero(share))
            variance += float(np.square(share * (difference - mean)).sum()) * count / max(1, count - 1)
        return mean, math.sqrt(variance)

    def _strata(self, target: Tensor) -> list[npt.NDArray[np.bool_]]:
        """Return masks ``[rows]`` of the rows over which means are taken."""
        if self.is_by_class:
            return [target.numpy() == label for label in (0, 1)]
        chosen = np.ones(len(target), bool)
        if self.is_by_query:  # one row speaks for a query
            chosen[:] = False
            chosen[np.unique(target[:, 1].numpy(), return_index=True)[1]] = True
        return [chosen]


def metric_of(name: str, head: PredictorModule, target: Tensor) -> Metric:
    """Return a metric by name.

    Classifiers: ``roc_auc`` ("auto" for two classes, both of them there), ``neg_log_loss`` ("auto" else),
    ``accuracy``. Regressors: ``neg_mean_squared_error`` ("auto"), ``neg_mean_absolute_error``. Rankers: ``ndcg``.

    Raises:
        InvalidInputError: no such metric, or the AUC of more or fewer than two classes.
    """
    table = _OF_CLASSES if is_classifier(head) else _OF_NUMBERS
    has_two = len(head.classes) == 2 and len(set(target.tolist())) == 2
    if name == "auto":
        name = ("roc_auc" if has_two else "neg_log_loss") if is_classifier(head) else "neg_mean_squared_error"
    if name not in table:
        raise InvalidInputError(f"metric is {name!r}; here it is one of {', '.join(table)}")
    if name == "roc_auc" and not has_two:
        raise InvalidInputError("roc_auc needs evaluation rows of two classes; choose neg_log_loss or accuracy")
    if name == "ndcg" and target.shape[1] != 2:
        raise InvalidInputError("ndcg is of rankers: use fine_tune_ranker, which takes the rows' queries")
    return Metric(name, table[name], is_by_class=name == "roc_auc", is_by_query=name == "ndcg")


def _placements(margin: Tensor, target: Tensor, weight: Tensor) -> Floats:
    """Return for each row the share of the other class on the right side of it, ties by half."""
    of_second = margin[:, 0] if margin.shape[1] == 1 else margin[:, 1] - margin[:, 0]
    values, index = np.unique(_floats(of_second), return_inverse=True)
    is_second, weights = target.numpy() == 1, _floats(weight)

    def share_below(chosen: npt.NDArray[np.bool_]) -> Floats:
        at = np.bincount(index, weights * chosen, len(values))
        share: Floats = (np.cumsum(at) - at / 2) / at.sum()
        return share

    below: Floats = np.where(is_second, share_below(~is_second)[index], 1 - share_below(is_second)[index])
    return below


def _floats(values: Tensor) -> Floats:
    result: Floats = values.double().numpy(force=True)
    return result


def _neg_log_loss(margin: Tensor, target: Tensor, _: Tensor) -> Floats:
    return -_floats(log_loss(margin, target))


def _accuracy(margin: Tensor, target: Tensor, _: Tensor) -> Floats:
    label = (margin[:, 0] > 0).long() if margin.shape[1] == 1 else margin.argmax(1)
    return _floats(label == target)


def _neg_squared(margin: Tensor, target: Tensor, _: Tensor) -> Floats:
    return -_floats((margin - target.reshape(margin.shape)).square().mean(1))


def _neg_absolute(margin: Tensor, target: Tensor, _: Tensor) -> Floats:
    return -_floats((margin - target.reshape(margin.shape)).abs().mean(1))


def _ndcg(margin: Tensor, target: Tensor, _: Tensor) -> Floats:
    return _floats(ndcg(margin, target))


_OF_CLASSES: dict[str, RowScores] = {"roc_auc": _placements, "neg_log_loss": _neg_log_loss, "accuracy": _accuracy}
_OF_NUMBERS: dict[str, RowScores] = {
    "neg_mean_squared_error": _neg_squared,
    "neg_mean_absolute_error": _neg_absolute,
    "ndcg": _ndcg,
}
