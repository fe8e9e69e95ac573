"""Heads of CatBoost's models: what it makes of sums of leaves."""

from __future__ import annotations

import torch
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule, Task
from mlsys_windtunnel.modules.tree.heads import TreeClassifier
from mlsys_windtunnel.modules.tree.trees import Trees
from torch import Tensor, nn


class CatBoostClasses(TreeClassifier):
    """A classifier whose ``predict`` gives a column of labels where there are three classes or more.

    Attributes:
        cut: The margin above which the second of two classes is answered.
    """

    cut = 0.0

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """Return logarithms of probabilities ``[rows, classes]``."""
        if self.link == "softmax":
            return scores.log_softmax(dim=1)
        scores = scores if scores.shape[1] > 1 else torch.cat([-scores, scores], dim=1)
        return nn.functional.logsigmoid(scores)

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``, or ``[rows, 1]`` for three classes or more."""
        return scores.argmax(dim=1, keepdim=True) if scores.shape[1] > 1 else (scores.squeeze(1) > self.cut).long()


class CatBoostLabels(PredictorModule):
    """Several labels at once, 0 or 1 each, with a probability each.

    Args:
        trees: ``[rows, labels]`` margins.
    """

    task: Task = "multilabel"

    def __init__(self, trees: Trees) -> None:
        super().__init__(answers=("predict", "predict_proba", "predict_log_proba"))
        self.trees = trees

    def forward(self, x: Tensor) -> Tensor:
        """Return scores ``[rows, labels]``."""
        scores: Tensor = self.trees(x)
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, labels]``."""
        return scores.sigmoid()

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """Return logarithms of probabilities ``[rows, labels]``."""
        return nn.functional.logsigmoid(scores)

    def prediction(self, scores: Tensor) -> Tensor:
        """Return 0 or 1 for each label, ``[rows, labels]`` int64."""
        return (scores > 0).long()


class MeanAndVariance(OperatorModule):
    """``[rows, 2]``: the mean, and the variance of what the trees give the logarithm of the deviation of."""

    def __init__(self, trees: Trees) -> None:
        super().__init__()
        self.trees = trees

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        mean, deviation = self.trees(x).unbind(1)
        return torch.stack([mean, torch.exp(2 * deviation)], dim=1)
