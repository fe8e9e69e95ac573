"""From scores to margins, and from margins to losses, whatever a pipeline ends in.

*Margins* are ``[rows, 1]`` log-odds of the second class, ``[rows, classes]`` logarithms of unnormalised probabilities,
or a regressor's predictions ``[rows, outputs]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor
from torch.nn import functional

from mlsys_windtunnel.finetune.options import RowLoss
from mlsys_windtunnel.modules.base import Classifier, PredictorModule

SMALLEST = 1e-6  # probabilities below count as this


def is_classifier(head: PredictorModule) -> bool:
    """Return whether a head answers classes.

    Raises:
        InvalidInputError: it answers neither classes nor numbers.
    """
    if head.task == "classification" and len(head.classes) >= 2:
        return True
    if head.task == "regression":
        return False
    kind = "classifier of one class" if head.task == "classification" else f"predictor of the kind {head.task}"
    raise InvalidInputError(f"the pipeline ends in a {kind}; classifiers and regressors can be fine-tuned")


def margins(head: PredictorModule, scores: Tensor) -> Tensor:
    """Return the margins of a predictor's scores, in their dtype."""
    if not is_classifier(head):
        answer = head.prediction(scores)
        return answer.unsqueeze(1) if answer.ndim == 1 else answer
    if isinstance(head, Classifier):
        slope = float(getattr(head, "slope", 1.0))
        if head.link == "logistic" and scores.shape[1] == 1:
            return scores * slope
        if head.link == "softmax":
            return scores * (slope if scores.shape[1] > 1 else 2 * slope)
    if "predict_proba" in head.answers:
        return head.probabilities(scores).clamp(min=SMALLEST).log()
    return head.table(scores, "decision_function")


def row_loss(loss: str | RowLoss, head: PredictorModule) -> RowLoss:
    """Return the loss of each row, by name.

    Classifiers: ``log_loss`` ("auto"), ``hinge``, ``focal`` (exponent 2). Regressors: ``squared_error`` ("auto"),
    ``absolute_error``, ``huber``, ``poisson``.

    Raises:
        InvalidInputError: no such loss, or "auto" for a ranker.
    """
    if callable(loss):
        return loss
    table = _OF_CLASSES if is_classifier(head) else _OF_NUMBERS
    if loss == "auto":
        refuse_ranker(head, "name the loss of a regressor, as loss='squared_error'")
    if loss != "auto" and loss not in table:
        raise InvalidInputError(f"loss is {loss!r}; here it is one of {', '.join(table)}, or a function")
    return next(iter(table.values())) if loss == "auto" else table[loss]


def refuse_ranker(head: PredictorModule, otherwise: str) -> None:
    """Raise InvalidInputError for a ranker, whose loss needs queries; ``otherwise`` says what else can be done."""
    if getattr(head, "ranks", False):
        raise InvalidInputError(f"this pipeline ranks rows within queries, which fine-tuning is not told: {otherwise}")


def log_loss(margin: Tensor, target: Tensor) -> Tensor:
    """Return the log loss of each row, ``[rows]``, from margins and class indices."""
    if margin.shape[1] == 1:
        label = target.to(margin.dtype)
        return functional.binary_cross_entropy_with_logits(margin[:, 0], label, reduction="none")
    return functional.cross_entropy(margin, target.long(), reduction="none")


def hinge(margin: Tensor, target: Tensor) -> Tensor:
    """Return the hinge loss of each row, ``[rows]``; for several classes, Crammer and Singer's."""
    if margin.shape[1] == 1:
        return (1 - (2 * target.to(margin.dtype) - 1) * margin[:, 0]).clamp(min=0)
    own = margin.gather(1, target.long().unsqueeze(1))
    others = margin.scatter(1, target.long().unsqueeze(1), -torch.inf).amax(1)
    return (1 - own[:, 0] + others).clamp(min=0)


def focal(margin: Tensor, target: Tensor) -> Tensor:
    """Return :func:`log_loss` times the square of what the right class lacks to 1 (Lin et al., 2017)."""
    loss = log_loss(margin, target)
    return loss * (1 - (-loss).exp()).square()


def _of_numbers(loss: Callable[..., Tensor]) -> RowLoss:
    """Return the mean over outputs of a loss of torch's."""
    return lambda margin, target: loss(margin, _as(margin, target), reduction="none").mean(dim=1)


def _poisson(margin: Tensor, target: Tensor) -> Tensor:
    mean = margin.clamp(min=SMALLEST)
    return (mean - _as(margin, target) * mean.log()).mean(dim=1)


def _as(margin: Tensor, target: Tensor) -> Tensor:
    return target.to(margin.dtype).reshape(margin.shape)


_OF_CLASSES: dict[str, RowLoss] = {"log_loss": log_loss, "hinge": hinge, "focal": focal}
_OF_NUMBERS: dict[str, RowLoss] = {
    "squared_error": _of_numbers(functional.mse_loss),
    "absolute_error": _of_numbers(functional.l1_loss),
    "huber": _of_numbers(functional.huber_loss),
    "poisson": _poisson,
}
