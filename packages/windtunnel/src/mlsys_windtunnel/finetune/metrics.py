"""What the best epoch is chosen by: scikit-learn's names, larger is better."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_windtunnel.finetune.losses import is_classifier, log_loss
from mlsys_windtunnel.modules.base import PredictorModule

Metric = Callable[[Tensor, Tensor, Tensor], float]  # margins, targets, weights


def metric_of(name: str, head: PredictorModule, target: Tensor) -> tuple[str, Metric]:
    """A metric with its name.

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
    return name, table[name]


def _roc_auc(margin: Tensor, target: Tensor, weight: Tensor) -> float:
    from sklearn.metrics import roc_auc_score

    of_second = margin[:, 0] if margin.shape[1] == 1 else margin[:, 1] - margin[:, 0]
    return float(roc_auc_score(target.numpy(), of_second.double().numpy(), sample_weight=weight.numpy()))


def _mean(values: Tensor, weight: Tensor) -> float:
    return float(np.average(values.double().numpy(), weights=weight.double().numpy()))


def _neg_log_loss(margin: Tensor, target: Tensor, weight: Tensor) -> float:
    return -_mean(log_loss(margin, target), weight)


def _accuracy(margin: Tensor, target: Tensor, weight: Tensor) -> float:
    label = (margin[:, 0] > 0).long() if margin.shape[1] == 1 else margin.argmax(1)
    return _mean((label == target).float(), weight)


def _neg_squared(margin: Tensor, target: Tensor, weight: Tensor) -> float:
    return -_mean((margin - target.reshape(margin.shape)).square().mean(1), weight)


def _neg_absolute(margin: Tensor, target: Tensor, weight: Tensor) -> float:
    return -_mean((margin - target.reshape(margin.shape)).abs().mean(1), weight)


_OF_CLASSES: dict[str, Metric] = {"roc_auc": _roc_auc, "neg_log_loss": _neg_log_loss, "accuracy": _accuracy}
_OF_NUMBERS: dict[str, Metric] = {
    "neg_mean_squared_error": _neg_squared,
    "neg_mean_absolute_error": _neg_absolute,
}
