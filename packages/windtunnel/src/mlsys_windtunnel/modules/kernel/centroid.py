"""Classes by their nearest centroids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task
from mlsys_windtunnel.modules.kernel.kernels import distances
from mlsys_windtunnel.modules.linear.discriminant import Posterior
from mlsys_windtunnel.modules.ties import nearest_is_unsure, sizes
from torch import Tensor, nn


class NearestCentroid(PredictorModule):
    """Classes by their centroids: Hastie et al., Elements of Statistical Learning, equation 18.2.

    The scores are discriminants and then, where all classes are as frequent, how near the centroids are: the source
    predicts from distances as they are, but computes probabilities from distances over standard deviations.

    Args:
        centroids: ``[classes, features]``.
        deviations: Within-class standard deviations, ``[features]``, none of them zero.
        log_priors: ``[classes]``.
        classes: The labels.
        p: Order of the Minkowski distance.
        predicts_by_distance: True if all classes are as frequent.
        answers: The methods of the source.
    """

    task: Task = "classification"
    stores_points = True

    def __init__(
        self,
        centroids: npt.ArrayLike,
        *,
        deviations: npt.ArrayLike,
        log_priors: npt.ArrayLike,
        classes: Sequence[object],
        p: float,
        predicts_by_distance: bool,
        answers: Sequence[str],
    ) -> None:
        super().__init__(classes=classes, answers=answers)
        self.centroids = nn.Parameter(torch.from_numpy(np.array(centroids, np.float64)))
        self.deviations = nn.Parameter(torch.from_numpy(np.array(deviations, np.float64)))
        self.log_priors = nn.Parameter(torch.from_numpy(np.array(log_priors, np.float64)))
        self.p = p
        self.predicts_by_distance = predicts_by_distance
        self.head = Posterior(nn.Identity(), classes=classes, answers=answers)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores ``[rows, classes]``, or twice as wide where distances decide."""
        far = distances(x / self.deviations, self.centroids / self.deviations, p=self.p)
        scores = 2 * self.log_priors - far.square()
        if not self.predicts_by_distance:
            return scores
        return torch.cat([scores, -distances(x, self.centroids, p=self.p)], dim=1)

    def judged(self, inputs: Sequence[Tensor], methods: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Compute the table, and the rows where the label of the nearest centroid may tie."""
        scores: Tensor = self(*inputs)
        if not self.predicts_by_distance or (methods and not {"predict", "labels"} & set(methods)):
            return scores, None
        labels = torch.arange(len(self.classes), device=scores.device)
        size = sizes(inputs[0], self.centroids)
        return scores, nearest_is_unsure(-scores[:, -len(self.classes) :], size, labels, by_product=True)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        return self.head.probabilities(scores[:, : len(self.classes)])

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """Return logarithms of probabilities ``[rows, classes]``."""
        return self.head.log_probabilities(scores[:, : len(self.classes)])

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for two classes, else ``[rows, classes]``."""
        return self.head.decision(scores[:, : len(self.classes)])

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return scores[:, -len(self.classes) :].argmax(dim=1)
