"""Metrics that choose the best epoch: scikit-learn's names, larger is better, and how sure a difference is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_windtunnel.finetune.losses import is_classifier, log_loss
from mlsys_windtunnel.modules.base import PredictorModule

Floats = npt.NDArray[np.float64]
RowScores = Callable[[Tensor, Tensor, Tensor], Floats]  # margins, targets, weights to [rows]


@dataclass(frozen=True, slots=True)
class Metric:
    """A score that is a mean over rows; for the AUC, of either class."""

    name: str
    row_scores: RowScores
    is_by_class: bool = False  # whether the score is the mean over the rows of each class

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
        return [np.ones(len(target), bool)]


def metric_of(name: str, head: PredictorModule, target: Tensor) -> Metric:
    """Return a metric by name.

    Classifiers: ``roc_auc`` ("auto" for two classes, both of them there), ``neg_log_loss`` ("auto" else),
    ``accuracy``. Regressors: ``neg_mean_squared_error`` ("auto"), ``neg_mean_absolute_error``.

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
    return Metric(name, table[name], is_by_class=name == "roc_auc")


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


_OF_CLASSES: dict[str, RowScores] = {"roc_auc": _placements, "neg_log_loss": _neg_log_loss, "accuracy": _accuracy}
_OF_NUMBERS: dict[str, RowScores] = {
    "neg_mean_squared_error": _neg_squared,
    "neg_mean_absolute_error": _neg_absolute,
}
