"""Distances of nearest neighbours beyond Minkowski's, by the names that scikit-learn gives them.

Some are Minkowski distances of mapped points (:class:`Mapping`): of unit vectors, centred ones, scaled or rotated ones.
The others are computed pair by pair.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.kernel.kernels import distances, unit
from torch import Tensor, nn

Metric = Literal[
    "minkowski",
    "sqeuclidean",
    "cosine",
    "correlation",
    "canberra",
    "braycurtis",
    "hamming",
    "nan_euclidean",
    "haversine",
    "jaccard",
    "dice",
    "rogerstanimoto",
    "russellrao",
    "sokalmichener",
    "sokalsneath",
    "yule",
]
METRICS: tuple[str, ...] = get_args(Metric)
PAIRS_PER_BLOCK = 1 << 21  # numbers of the largest table [rows, samples, features]


class Distance(nn.Module):
    """Distance of each row from each sample.

    Args:
        metric: Name of the metric.
        rotation: Matrix ``[features, k]`` that rows are multiplied by before all else; None: none.
    """

    rotation: Tensor | None

    def __init__(self, metric: Metric, *, rotation: npt.ArrayLike | None = None) -> None:
        super().__init__()
        self.metric: Metric = metric
        self.register_buffer("rotation", None if rotation is None else torch.from_numpy(np.array(rotation, np.float64)))

    def mapped(self, x: Tensor) -> Tensor:
        """Return rows as the distance compares them."""
        if self.rotation is not None:
            x = x @ self.rotation
        if self.metric == "correlation":
            x = x - x.mean(dim=1, keepdim=True)
        return unit(x) if self.metric in ("cosine", "correlation") else x

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:
        """Return distances ``[rows, samples]`` of mapped rows from mapped samples."""
        if self.metric == "minkowski":
            return distances(x, samples)
        if self.metric == "sqeuclidean":
            return distances(x, samples).square()
        if self.metric in ("cosine", "correlation"):
            return 1 - x @ samples.T
        if torch.compiler.is_compiling() or x.shape[0] * samples.numel() <= PAIRS_PER_BLOCK:
            return self._pairs(x.unsqueeze(1), samples)
        rows = max(1, PAIRS_PER_BLOCK // samples.numel())
        blocks = [x[at : at + rows] for at in range(0, x.shape[0], rows)]
        return torch.cat([self._pairs(block.unsqueeze(1), samples) for block in blocks])

    def to_each(self, x: Tensor, samples: Tensor) -> Tensor:
        """Return distances ``[rows, k]`` of rows from their own samples ``[rows, k, features]``."""
        if self.metric == "minkowski":
            far: Tensor = torch.linalg.vector_norm(x.unsqueeze(1) - samples, ord=2, dim=2)
            return far
        if self.metric == "sqeuclidean":
            return (x.unsqueeze(1) - samples).square().sum(dim=2)
        if self.metric in ("cosine", "correlation"):
            return 1 - (x.unsqueeze(1) * samples).sum(dim=2)
        return self._pairs(x.unsqueeze(1), samples)

    def _pairs(self, x: Tensor, other: Tensor) -> Tensor:
        """Return distances over the last dimension, broadcast over the others."""
        if self.metric == "nan_euclidean":
            both = ~(x.isnan() | other.isnan())
            squares = torch.where(both, x - other, 0).square().sum(dim=-1)
            count = both.sum(dim=-1)
            return torch.where(count == 0, torch.nan, (squares * (x.shape[-1] / count.clamp_min(1))).sqrt())
        if self.metric == "haversine":
            half = (0.5 * (x - other)).sin().square()
            cosines = x[..., 0].cos() * other[..., 0].cos()
            return 2 * torch.asin((half[..., 0] + cosines * half[..., 1]).sqrt().clamp(max=1))
        gap, size = (x - other).abs(), x.abs() + other.abs()
        if self.metric == "canberra":
            return torch.where(size > 0, gap / torch.where(size > 0, size, 1), 0).sum(dim=-1)
        if self.metric == "braycurtis":
            total = size.sum(dim=-1)
            return torch.where(total > 0, gap.sum(dim=-1) / torch.where(total > 0, total, 1), 0)
        if self.metric == "hamming":
            return (x != other).to(x.dtype).mean(dim=-1)
        return self._of_truths(x != 0, other != 0, x.dtype)

    def _of_truths(self, x: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
        """Return distances of truth values: shares of those that differ."""
        unequal = (x != other).sum(dim=-1).to(dtype)
        both = (x & other).sum(dim=-1).to(dtype)
        count = x.shape[-1]
        if self.metric == "russellrao":
            return (count - both) / count
        if self.metric in ("rogerstanimoto", "sokalmichener"):  # two names of one distance
            return 2 * unequal / (count + unequal)
        if self.metric == "yule":
            neither, first = (~x & ~other).sum(dim=-1).to(dtype), (x & ~other).sum(dim=-1).to(dtype)
            above = 2 * first * (unequal - first)
            return torch.where(above > 0, above / (both * neither + above / 2).clamp_min(0.5), 0)
        weight = {"jaccard": (1.0, 1.0), "dice": (1.0, 2.0), "sokalsneath": (2.0, 1.0)}[self.metric]
        above, shared = weight[0] * unequal, weight[1] * both
        total = above + shared
        return torch.where(total > 0, above / torch.where(total > 0, total, 1), 0)


def as_metric(name: str) -> Metric | None:
    """Return the metric of a name, or None if it is not known here."""
    return cast(Metric, name) if name in METRICS else None
