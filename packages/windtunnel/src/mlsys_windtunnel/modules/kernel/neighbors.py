"""Nearest neighbours by exact search over stored samples, and nearest centroids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task
from mlsys_windtunnel.modules.kernel.kernels import distances
from mlsys_windtunnel.modules.linear.discriminant import Posterior
from torch import Tensor, nn

SAMPLES_PER_BLOCK = 2_048  # stored samples that are compared at once: bounds the table of distances


def nearest(x: Tensor, samples: Tensor, k: int, *, p: float = 2.0) -> Tensor:
    """Places of the ``k`` nearest samples of each row, nearest first, ``[rows, k]`` int64.

    The search goes over blocks of samples, so the largest table is ``[rows, k + SAMPLES_PER_BLOCK]``. Which of
    several samples at exactly the same distance is taken is not defined.

    Args:
        x: ``[rows, features]``.
        samples: ``[samples, features]``, at least ``k``.
        k: How many.
        p: Of the Minkowski distance; infinity is the largest difference.

    Example:
        >>> nearest(torch.tensor([[0.9]]), torch.tensor([[0.0], [1.0], [5.0]]), 2).tolist()
        [[1, 0]]
    """
    with torch.no_grad():
        best = x.new_empty(x.shape[0], 0)  # not len(x), which export would take for a constant
        places = torch.empty(x.shape[0], 0, dtype=torch.int64, device=x.device)
        for start in range(0, len(samples), SAMPLES_PER_BLOCK):
            block = samples[start : start + SAMPLES_PER_BLOCK]
            far, found = distances(x, block, p=p).topk(min(k, len(block)), dim=1, largest=False)
            best, places = torch.cat([best, far], dim=1), torch.cat([places, found + start], dim=1)
            best, order = best.topk(min(k, best.shape[1]), dim=1, largest=False)
            places = places.gather(1, order)
    return places


class NeighborAverage(nn.Module):
    """The average of the nearest samples' values, plain or weighted by inverse distance.

    Samples and values are trainable; the samples feel a gradient only through distance weights, and the choice of
    neighbours none.

    Args:
        samples: ``[samples, features]``.
        values: What is averaged, ``[samples, outputs]``: targets, or one-hot classes.
        k: Number of neighbours.
        p: Of the Minkowski distance.
        scale: Factor of each feature, ``[features]``; None: one.
        by_distance: Whether to weight by inverse distance. Samples at distance zero then outweigh all others.
    """

    scale: Tensor | None

    def __init__(
        self,
        samples: npt.ArrayLike,
        values: npt.ArrayLike,
        *,
        k: int,
        p: float,
        scale: npt.ArrayLike | None,
        by_distance: bool,
    ) -> None:
        super().__init__()
        self.samples = nn.Parameter(torch.from_numpy(np.array(samples, np.float64)))
        self.values = nn.Parameter(torch.from_numpy(np.array(values, np.float64)))
        self.register_buffer("scale", None if scale is None else torch.from_numpy(np.array(scale, np.float64)))
        self.k, self.p, self.by_distance = k, p, by_distance

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, outputs]``."""
        samples: Tensor = self.samples
        if self.scale is not None:
            x, samples = x * self.scale, samples * self.scale
        places = nearest(x, samples, self.k, p=self.p)
        values = self.values[places]
        if not self.by_distance:
            return values.sum(dim=1) / self.k
        far = torch.linalg.vector_norm(x.unsqueeze(1) - samples[places], ord=self.p, dim=2)
        is_same = (1 / far).isinf()
        inverse = 1 / torch.where(is_same, 1, far)
        weights = torch.where(is_same.any(dim=1, keepdim=True), is_same.to(x.dtype), inverse)
        return (values * weights.unsqueeze(2)).sum(dim=1) / weights.sum(dim=1, keepdim=True)


class OutputVotes(PredictorModule):
    """A classifier of several outputs, whose scores are each output's probabilities side by side.

    Args:
        body: Tables in, ``[rows, sum of classes]`` out.
        outputs: The labels of each output.
    """

    task: Task = "classification"

    def __init__(self, body: nn.Module, *, outputs: Sequence[Sequence[object]]) -> None:
        super().__init__(answers=("predict", "predict_proba"))
        self.body = body
        self.outputs = tuple(tuple(labels) for labels in outputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        """``[rows, sum of classes]``."""
        scores: Tensor = self.body(*inputs)
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """``[rows, sum of classes]``."""
        return scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Class indices, ``[rows, outputs]`` int64."""
        each = torch.split(scores, [len(labels) for labels in self.outputs], dim=1)
        return torch.stack([votes.argmax(dim=1) for votes in each], dim=1)


class NearestCentroid(PredictorModule):
    """Classes by their centroids: Hastie et al., Elements of Statistical Learning, equation 18.2.

    The scores are discriminants and then, where all classes are as frequent, how near the centroids are: the source
    predicts from distances as they are, but computes probabilities from distances over standard deviations.

    Args:
        centroids: ``[classes, features]``.
        deviations: Within-class standard deviations, ``[features]``, none of them zero.
        log_priors: ``[classes]``.
        classes: The labels.
        p: Of the Minkowski distance.
        predicts_by_distance: Whether all classes are as frequent.
        answers: The methods of the source.
    """

    task: Task = "classification"

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
        """``[rows, classes]``, or twice as wide where distances decide."""
        far = distances(x / self.deviations, self.centroids / self.deviations, p=self.p)
        scores = 2 * self.log_priors - far.square()
        if not self.predicts_by_distance:
            return scores
        return torch.cat([scores, -distances(x, self.centroids, p=self.p)], dim=1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """``[rows, classes]``."""
        return self.head.probabilities(scores[:, : len(self.classes)])

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """``[rows, classes]``."""
        return self.head.log_probabilities(scores[:, : len(self.classes)])

    def decision(self, scores: Tensor) -> Tensor:
        """``[rows]`` for two classes, else ``[rows, classes]``."""
        return self.head.decision(scores[:, : len(self.classes)])

    def prediction(self, scores: Tensor) -> Tensor:
        """Class indices, ``[rows]``."""
        return scores[:, -len(self.classes) :].argmax(dim=1)
