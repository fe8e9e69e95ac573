"""Generative classifiers: log-densities of Gaussians, discrete naive Bayes, and the heads over these."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.modules.base import Classifier, PredictorModule, Task, parameter
from torch import Tensor, nn


class Posterior(PredictorModule):
    """A classifier whose scores are log-likelihoods of row and class together, up to a constant of the row.

    Args:
        body: Tables in, ``[rows, classes]`` out.
        answers: The methods of the source; ``decision_function`` of two classes is the difference of their scores.
    """

    task: Task = "classification"

    def __init__(self, body: nn.Module, *, classes: Sequence[object], answers: Sequence[str]) -> None:
        super().__init__(classes=classes, answers=answers)
        self.body = body

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


class Binarize(nn.Module):
    """1 where a number is beyond a threshold, else 0."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        """Return 1 where ``x`` is above the threshold, else 0; in the shape and dtype of ``x``."""
        return (x > self.threshold).to(x.dtype)


class CategoryLogLikelihood(nn.Module):
    """Sum over features of what each feature's code adds to each class.

    Args:
        tables: For each feature ``[classes, categories]``: log-probabilities of the codes 0, 1, ...
        bias: ``[classes]``: log-priors.
    """

    start: Tensor
    num_categories: Tensor

    def __init__(self, tables: Sequence[npt.ArrayLike], bias: npt.ArrayLike) -> None:
        super().__init__()
        arrays = [np.asarray(table, np.float64) for table in tables]
        counts = np.array([array.shape[1] for array in arrays])
        self.weight = nn.Parameter(torch.from_numpy(np.concatenate(arrays, axis=1).T.copy()))
        self.bias = parameter(bias)
        self.register_buffer("start", torch.from_numpy(np.cumsum(counts) - counts))
        self.register_buffer("num_categories", torch.from_numpy(counts))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, classes]``; codes are cut to integers, as the source does.

        A code without a category gives NaN in an exported or compiled module, which cannot raise.

        Raises:
            InvalidInputError: a code without a category.
        """
        codes = x.trunc()
        is_known = (codes >= 0) & (codes < self.num_categories)
        if not (torch.compiler.is_compiling() or torch.compiler.is_exporting()) and not bool(is_known.all()):
            row, feature = (int(index) for index in (~is_known).nonzero()[0])
            code = float(x[row, feature])
            said = "NaN" if code != code else f"{code:g}"
            raise InvalidInputError(
                f"row {row} has {said} in feature {feature}, which has the categories 0 to "
                f"{int(self.num_categories[feature]) - 1}; set min_categories when fitting to allow for more"
            )
        indices = torch.where(is_known, codes, 0).long() + self.start
        joint = self.weight[indices].sum(dim=1) + self.bias
        return torch.where(is_known.all(dim=1, keepdim=True), joint, torch.nan)


class DiagonalGaussians(nn.Module):
    """``bias_k + log N(x; mean_k, diag(scale_k)^-2)`` for each component ``k``.

    Args:
        means: ``[components, features]``.
        scales: Inverse standard deviations, ``[components, features]``, or ``[components, 1]`` for round ones.
        bias: ``[components]``: logarithms of weights or priors.
    """

    def __init__(self, means: npt.ArrayLike, scales: npt.ArrayLike, bias: npt.ArrayLike) -> None:
        super().__init__()
        self.means = parameter(means)
        self.log_scales = parameter(np.log(np.asarray(scales, np.float64)))
        self.bias = parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-densities ``[rows, components]``."""
        log_scales = self.log_scales.expand_as(self.means)
        scales = log_scales.exp()
        squares = [((x - mean) * scale).square().sum(dim=1) for mean, scale in zip(self.means, scales, strict=True)]
        return _log_density(squares, self.bias + log_scales.sum(dim=1), x.shape[1])


class FullGaussians(nn.Module):
    """``bias_k + log N(x; mean_k, (F_k F_k^T)^-1)`` with ``F_k = directions_k * exp(log_scales_k)``, column by column.

    The columns of ``directions_k`` are a matrix of determinant one in size (orthogonal, or unit triangular), so the
    density's volume is in the scales alone.

    Args:
        means: ``[components, features]``.
        directions: ``[components, features, rank]``, or ``[1, features, rank]`` where the components share it.
        log_scales: ``[components, rank]`` or ``[1, rank]``.
        bias: ``[components]``: logarithms of weights or priors.
    """

    def __init__(
        self, means: npt.ArrayLike, directions: npt.ArrayLike, log_scales: npt.ArrayLike, bias: npt.ArrayLike
    ) -> None:
        super().__init__()
        self.means = parameter(means)
        self.directions = parameter(directions)
        self.log_scales = parameter(log_scales)
        self.bias = parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-densities ``[rows, components]``."""
        factors = self.directions * self.log_scales.exp().unsqueeze(1)
        factors = factors.expand(len(self.means), -1, -1)
        squares = [((x - mean) @ factor).square().sum(dim=1) for mean, factor in zip(self.means, factors, strict=True)]
        return _log_density(squares, self.bias + self.log_scales.sum(dim=1), x.shape[1])


class Nearness(nn.Module):
    """Squared Mahalanobis distance from a mean, negated, above an offset.

    Args:
        mean: ``[features]``.
        precision: Inverse covariance, ``[features, features]``.
        offset: Taken off.
    """

    def __init__(self, mean: npt.ArrayLike, precision: npt.ArrayLike, offset: float) -> None:
        super().__init__()
        self.mean, self.precision = parameter(mean), parameter(precision)
        self.offset = parameter(offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, 1]``."""
        centred = x - self.mean
        squares = (centred * (centred @ self.precision)).sum(dim=1, keepdim=True)
        return -squares - self.offset


def _log_density(squares: list[Tensor], offset: Tensor, num_features: int) -> Tensor:
    """Return log-densities from squared whitened distances, one ``[rows]`` per component."""
    return offset - 0.5 * (num_features * math.log(2 * math.pi) + torch.stack(squares, dim=1))
