"""Heads of generative classifiers: from joint log-likelihoods, or from linear discriminants, to answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mlsys_windtunnel.modules.base import Classifier, PredictorModule, Task
from torch import Tensor, nn


class Posterior(PredictorModule):
    """A classifier whose scores are log-likelihoods of row and class together, up to a constant of the row.

    Args:
        body: Tables in, ``[rows, classes]`` out.
        classes: The labels.
        answers: The methods of the source; ``decision_function`` of two classes is the difference of their scores.
    """

    task: Task = "classification"

    def __init__(self, body: nn.Module, *, classes: Sequence[object], answers: Sequence[str]) -> None:
        super().__init__(classes=classes, answers=answers)
        self.body = body

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return scores ``[rows, classes]``."""
        scores: Tensor = self.body(*inputs)
        return scores

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """Return logarithms of probabilities ``[rows, classes]``: finite where probabilities underflow."""
        return scores.log_softmax(dim=1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        return scores.softmax(dim=1)

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for two classes, else ``[rows, classes]``."""
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return scores.argmax(dim=1)


class LinearDiscriminant(PredictorModule):
    """A linear classifier that also projects: its scores are margins and projected rows side by side.

    Args:
        head: Head that answers from the margins.
        projection: Tables in, ``[rows, k]`` out; None where the source cannot transform.
    """

    task: Task = "classification"

    def __init__(self, head: Classifier, *, projection: nn.Module | None) -> None:
        answers = head.answers if projection is None else head.answers | {"transform"}
        super().__init__(classes=head.classes, answers=tuple(answers))
        self.head = head
        self.projection = projection
        self.num_margins = 1 if len(head.classes) == 2 else len(head.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, margins + k]``."""
        margins: Tensor = self.head(x)
        return margins if self.projection is None else torch.cat([margins, self.projection(x)], dim=1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        return self.head.probabilities(scores[:, : self.num_margins])

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """Return logarithms of probabilities ``[rows, classes]``; 0 counts as the smallest normal number."""
        probabilities = self.probabilities(scores)
        smallest = torch.finfo(probabilities.dtype).tiny
        return torch.where(probabilities == 0, smallest, probabilities).log()

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for two classes, else ``[rows, classes]``."""
        return self.head.decision(scores[:, : self.num_margins])

    def features(self, scores: Tensor) -> Tensor:
        """Return projected rows ``[rows, k]``."""
        return scores[:, self.num_margins :]

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return self.head.prediction(scores[:, : self.num_margins])
