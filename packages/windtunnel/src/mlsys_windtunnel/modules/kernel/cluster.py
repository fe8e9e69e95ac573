"""Clusterers by nearest centre, by a tree of centres, and mixtures of Gaussians."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task, parameter
from mlsys_windtunnel.modules.kernel.kernels import distances
from mlsys_windtunnel.modules.ties import nearest_is_unsure, sizes, uncertainty
from torch import Tensor, nn


class NearestCenter(PredictorModule):
    """Clusters by Euclidean distance; the scores are the distances to the centres.

    Args:
        centers: ``[centers, features]``.
        labels: The cluster of each centre, ``[centers]``; None: each is its own.
    """

    task: Task = "clustering"
    stores_points = True
    labels: Tensor

    def __init__(
        self,
        centers: npt.ArrayLike,
        *,
        labels: npt.ArrayLike | None = None,
        answers: Sequence[str] = ("predict", "transform"),
    ) -> None:
        super().__init__(answers=answers)
        self.centers = parameter(centers)
        numbers = np.arange(len(self.centers)) if labels is None else np.array(labels, np.int64)
        self.register_buffer("labels", torch.from_numpy(numbers))

    def forward(self, x: Tensor) -> Tensor:
        """Return distances, ``[rows, centers]``."""
        return distances(x, self.centers)

    def judged(self, inputs: Sequence[Tensor], methods: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Compute the table, and the rows where labels may tie; distances do not."""
        scores: Tensor = self(*inputs)
        if tuple(methods) == ("transform",):
            return scores, None
        return scores, nearest_is_unsure(scores, sizes(inputs[0], self.centers), self.labels, by_product=True)

    def prediction(self, scores: Tensor) -> Tensor:
        """Return cluster numbers, ``[rows]``."""
        return self.labels[scores.argmin(dim=1)]


class CenterTree(PredictorModule):
    """Bisecting k-means: at each node of a tree a row goes to the nearer of two centres, the left one if both are.

    The scores are the distances to the leaves' centres, and by how much each node's right centre is farther.

    Args:
        centers: Centres of the leaves, ``[leaves, features]``.
        pairs: The two centres of each node, ``[nodes, 2, features]``.
        paths: For each leaf and node 1 or -1 if the leaf is below the node's left or right, else 0.
    """

    task: Task = "clustering"
    stores_points = True
    paths: Tensor

    def __init__(self, centers: npt.ArrayLike, *, pairs: npt.ArrayLike, paths: npt.ArrayLike) -> None:
        super().__init__(answers=("predict", "transform"))
        self.centers = parameter(centers)
        self.pairs = parameter(pairs)
        self.register_buffer("paths", torch.from_numpy(np.array(paths, np.float64)))

    def forward(self, x: Tensor) -> Tensor:
        """Return distances and margins, ``[rows, leaves + nodes]``."""
        margins = distances(x, self.pairs[:, 1]) - distances(x, self.pairs[:, 0])
        return torch.cat([distances(x, self.centers), margins], dim=1)

    def judged(self, inputs: Sequence[Tensor], methods: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Compute the table, and the rows where a turn on the way to the leaf may tie."""
        scores: Tensor = self(*inputs)
        if tuple(methods) == ("transform",):
            return scores, None
        (x,) = inputs
        size = sizes(x, self.pairs.flatten(0, 1)).unsqueeze(1)
        far = distances(x, self.pairs[:, 0])
        is_level = scores[:, len(self.centers) :].abs() <= 2 * uncertainty(far, size, by_product=True)
        return scores, (is_level & (self.paths[self.prediction(scores)] != 0)).any(dim=1)

    def features(self, scores: Tensor) -> Tensor:
        """Return distances to the leaves' centres, ``[rows, leaves]``."""
        return scores[:, : len(self.centers)]

    def prediction(self, scores: Tensor) -> Tensor:
        """Return cluster numbers, ``[rows]``: of the one leaf with which all turns on its way agree."""
        turns = torch.where(scores[:, len(self.centers) :] >= 0, 1.0, -1.0).to(self.paths.dtype)
        missed = self.paths.abs().sum(dim=1) - turns @ self.paths.T
        return missed.argmin(dim=1)


class Mixture(PredictorModule):
    """A mixture of densities; the scores are weighted log-densities ``[rows, components]``.

    Args:
        body: Tables in, scores out.
    """

    task: Task = "clustering"

    def __init__(self, body: nn.Module) -> None:
        super().__init__(answers=("predict", "predict_proba", "score_samples"))
        self.body = body

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return responsibilities, ``[rows, components]``."""
        return scores.softmax(dim=1)

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """Return logarithms of responsibilities, ``[rows, components]``."""
        return scores.log_softmax(dim=1)

    def samples(self, scores: Tensor) -> Tensor:
        """Return log-densities, ``[rows]``."""
        return scores.logsumexp(dim=1)

    def prediction(self, scores: Tensor) -> Tensor:
        """Return component numbers, ``[rows]``."""
        return scores.argmax(dim=1)
