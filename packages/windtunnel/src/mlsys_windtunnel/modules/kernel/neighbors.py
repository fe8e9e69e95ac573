"""Nearest neighbours by exact search over stored samples, and nearest centroids."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task, has_ties, parameter
from mlsys_windtunnel.modules.kernel.kernels import distances
from mlsys_windtunnel.modules.kernel.metrics import Distance
from mlsys_windtunnel.modules.linear.discriminant import Posterior
from mlsys_windtunnel.modules.ties import nearest_is_unsure, sizes, uncertainty
from torch import Tensor, nn

ALLOWED = 1e-6  # difference of answers
SAMPLES_PER_BLOCK = 2_048  # stored samples that are compared at once: bounds the table of distances


def nearest(
    x: Tensor, samples: Tensor, k: int, *, p: float = 2.0, distance: Distance | None = None
) -> tuple[Tensor, Tensor]:
    """Return distances and indices (int64) of the ``k`` nearest samples of each row, nearest first, ``[rows, k]`` both.

    The search goes over blocks of samples, so the largest table is ``[rows, k + SAMPLES_PER_BLOCK]``. Which of
    several samples at exactly the same distance is taken is not defined.

    Args:
        x: ``[rows, features]``.
        samples: ``[samples, features]``, at least ``k``.
        k: Number of neighbours.
        p: Order of the Minkowski distance; infinity is the largest difference.
        distance: Another distance, of rows and samples that it has mapped; None: Minkowski's.

    Example:
        >>> nearest(torch.tensor([[0.9]]), torch.tensor([[0.0], [1.0], [5.0]]), 2)[1].tolist()
        [[1, 0]]
    """
    with torch.no_grad():
        best = x.new_empty(x.shape[0], 0)  # not len(x), which export would take for a constant
        indices = torch.empty(x.shape[0], 0, dtype=torch.int64, device=x.device)
        for start in range(0, len(samples), SAMPLES_PER_BLOCK):
            block = samples[start : start + SAMPLES_PER_BLOCK]
            every = distances(x, block, p=p) if distance is None else distance(x, block)
            far, found = every.topk(min(k, len(block)), dim=1, largest=False)
            best, indices = torch.cat([best, far], dim=1), torch.cat([indices, found + start], dim=1)
            best, order = best.topk(min(k, best.shape[1]), dim=1, largest=False)
            indices = indices.gather(1, order)
    return best, indices


class NeighborAverage(nn.Module):
    """The average of the nearest samples' values, plain or weighted by inverse distance.

    Samples and values are trainable; the samples feel a gradient only through distance weights, and the choice of
    neighbours none.

    Args:
        samples: ``[samples, features]``.
        values: Values to average, ``[samples, outputs]``: targets, or one-hot classes.
        k: Number of neighbours.
        p: Order of the Minkowski distance.
        scale: Factor of each feature, ``[features]``; None: one.
        by_distance: True weights by inverse distance. Samples at distance zero then outweigh all others.
        by_product: True if the source computes distances by a matrix product.
        votes: Number of classes of each output; none: the values are no votes.
        distance: Another distance than Minkowski's; None: that.
    """

    stores_points = True
    scale: Tensor | None
    kinds: Tensor

    def __init__(
        self,
        samples: npt.ArrayLike,
        values: npt.ArrayLike,
        *,
        k: int,
        p: float,
        scale: npt.ArrayLike | None,
        by_distance: bool,
        by_product: bool = False,
        votes: Sequence[int] = (),
        distance: Distance | None = None,
    ) -> None:
        super().__init__()
        self.samples = parameter(samples)
        self.values = parameter(values)
        self.register_buffer("scale", None if scale is None else torch.from_numpy(np.array(scale, np.float64)))
        self.register_buffer("kinds", torch.unique(self.values.detach(), dim=0, return_inverse=True)[1])
        self.k, self.p, self.by_distance = k, p, by_distance
        self.by_product, self.votes = by_product, tuple(votes)
        self.distance = distance

    def forward(self, x: Tensor) -> Tensor:
        """Return averages ``[rows, outputs]``."""
        _, indices, _ = self.found(x)
        x, samples = self._scaled(x)
        return self._average(x, samples, indices)

    def judged(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what ``forward`` does, and which rows tie so that it shows in the answer, ``[rows]`` bool.

        The last index among the neighbours may be any of several samples with different values; weighted votes may be
        level; and a source's distance near zero may be of rounding alone, which by its inverse weighs much.
        """
        far, indices, unsure = self.found(x, judges=True)
        assert unsure is not None
        x, samples = self._scaled(x)
        table = self._average(x, samples, indices)
        if self.by_distance:
            unsure = unsure | self._is_level(table)
            if self.by_product:
                unsure = unsure | self._is_lost(far, self._size(x, samples), indices)
        return table, unsure

    def found(self, x: Tensor, *, judges: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return distances and indices of the nearest samples, ``[rows, k]`` both.

        With ``judges``, also where samples of different values tie for the last place, ``[rows]`` bool.
        """
        x, samples = self._scaled(x)
        if not judges:
            return *nearest(x, samples, self.k, p=self.p, distance=self._metric), None
        far, indices = nearest(x, samples, min(self.k + 1, len(samples)), p=self.p, distance=self._metric)
        unsure = torch.zeros_like(far[:, 0], dtype=torch.bool)
        if len(samples) > self.k:
            last = far[:, self.k - 1 : self.k]
            error = 2 * uncertainty(last, self._size(x, samples), by_product=self.by_product)
            is_tied = (far[:, self.k :] - last <= error).squeeze(1)
            if torch.compiler.is_exporting():
                unsure = is_tied & self._has_choice(x, samples, last, error)
            elif bool(is_tied.any()):
                unsure[is_tied] = self._has_choice(x[is_tied], samples, last[is_tied], error[is_tied])
        return far[:, : self.k], indices[:, : self.k], unsure

    @staticmethod
    def _size(x: Tensor, samples: Tensor) -> Tensor:
        return sizes(x.nan_to_num(), samples.nan_to_num()).unsqueeze(1)

    @property
    def _metric(self) -> Distance | None:
        """Another distance than Minkowski's; a folder of an earlier version names none."""
        metric: Distance | None = getattr(self, "distance", None)
        return metric

    def _has_choice(self, x: Tensor, samples: Tensor, last: Tensor, error: Tensor) -> Tensor:
        """Return where more samples than needed, of different values, are ``last`` far within ``error``."""
        nearer = torch.zeros_like(last[:, 0], dtype=torch.int64)
        tied, high = nearer, torch.full_like(nearer, -1)
        low = torch.full_like(nearer, len(samples))
        for start in range(0, len(samples), SAMPLES_PER_BLOCK):
            block = samples[start : start + SAMPLES_PER_BLOCK]
            metric = self._metric
            far = (distances(x, block, p=self.p) if metric is None else metric(x, block)) - last
            kinds = self.kinds[start : start + SAMPLES_PER_BLOCK]
            is_tied = far.abs() <= error
            nearer, tied = nearer + (far < -error).sum(dim=1), tied + is_tied.sum(dim=1)
            low = torch.minimum(low, torch.where(is_tied, kinds, len(samples)).amin(dim=1))
            high = torch.maximum(high, torch.where(is_tied, kinds, -1).amax(dim=1))
        return (nearer + tied > self.k) & (low != high)

    def _is_level(self, table: Tensor) -> Tensor:
        """Return where the two classes of an output with the most votes are level but for rounding."""
        margins = (
            [
                votes.topk(2, dim=1).values.diff(dim=1).abs()
                for votes in torch.split(table, list(self.votes), dim=1)
                if votes.shape[1] > 1
            ]
            if self.votes
            else []
        )
        bound = max(1e-9, 16 * torch.finfo(table.dtype).eps)
        is_level = torch.zeros_like(table[:, 0], dtype=torch.bool)
        return is_level if not margins else (torch.cat(margins, dim=1) <= bound).any(dim=1)

    def _is_lost(self, far: Tensor, size: Tensor, indices: Tensor) -> Tensor:
        """Return where the weights of neighbours follow from the rounding of squared distances."""
        noise = 2 * math.sqrt(torch.finfo(far.dtype).eps) * size
        weights = 1 / torch.maximum(far, noise).clamp_min(torch.finfo(far.dtype).tiny)
        shares = weights / weights.sum(dim=1, keepdim=True)
        errors = (shares * (1 - shares) * (noise * weights).square()).amax(dim=1)
        kinds = self.kinds[indices]
        return (errors > ALLOWED) & (kinds != kinds[:, :1]).any(dim=1)

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        samples: Tensor = self.samples
        if (metric := self._metric) is not None:
            return metric.mapped(x), metric.mapped(samples)
        return (x, samples) if self.scale is None else (x * self.scale, samples * self.scale)

    def _average(self, x: Tensor, samples: Tensor, indices: Tensor) -> Tensor:
        """Return averages ``[rows, outputs]`` from the neighbours' indices."""
        values = self.values[indices]
        if not self.by_distance:
            return values.sum(dim=1) / self.k
        if (metric := self._metric) is not None:
            far = metric.to_each(x, samples[indices])
        else:
            far = torch.linalg.vector_norm(x.unsqueeze(1) - samples[indices], ord=self.p, dim=2)
        is_same = (1 / far).isinf()
        inverse = 1 / torch.where(is_same, 1, far)
        weights = torch.where(is_same.any(dim=1, keepdim=True), is_same.to(x.dtype), inverse)
        return (values * weights.unsqueeze(2)).sum(dim=1) / weights.sum(dim=1, keepdim=True)


class Shares(nn.Module):
    """A body's values over their sum, row by row; NaN where all are 0, as in the source."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.stores_points = has_ties(body)

    def forward(self, x: Tensor) -> Tensor:
        """Return shares ``[rows, outputs]``."""
        return self._shared(self.body(x))

    def judged(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Judge as its body does."""
        table, unsure = self.body.judged(x)  # type: ignore[operator]
        return self._shared(table), unsure

    @staticmethod
    def _shared(table: Tensor) -> Tensor:
        return table / table.sum(dim=1, keepdim=True)


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

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, sum of classes]``."""
        return scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows, outputs]`` int64."""
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
        p: Order of the Minkowski distance.
        predicts_by_distance: True if all classes are as frequent.
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
        self.centroids = parameter(centroids)
        self.deviations = parameter(deviations)
        self.log_priors = parameter(log_priors)
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
