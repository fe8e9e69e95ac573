"""Support vector machines: kernel expansions, votes between pairs of classes, and Platt's probabilities of them.

A machine for k classes is k (k - 1) / 2 binary ones. Their decision values, in the order (0, 1), (0, 2), ..., are the
scores; positive speaks for the first class of the pair, as in libsvm (for two classes scikit-learn turns the sign).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task, parameter
from torch import Tensor, nn

SMALLEST_PROBABILITY = 1e-7  # libsvm's bound for the probability within a pair
COUPLING_ROUNDS = 100  # libsvm's bound for the rounds of coupling


class KernelExpansion(nn.Module):
    """``kernel(x) @ weights.T + intercept``: one decision value per row of weights.

    Args:
        kernel: Tables in, ``[rows, support vectors]`` out.
        weights: ``[outputs, support vectors]``.
        intercept: ``[outputs]``.
    """

    def __init__(self, kernel: nn.Module, weights: npt.ArrayLike, intercept: npt.ArrayLike) -> None:
        super().__init__()
        self.kernel = kernel
        self.weights = parameter(weights)
        self.intercept = parameter(intercept)

    def forward(self, x: Tensor) -> Tensor:
        """Return decision values ``[rows, outputs]``."""
        result: Tensor = self.kernel(x) @ self.weights.T + self.intercept
        return result


class PairwiseExpansion(nn.Module):
    """The decision values of all pairs of classes, from libsvm's compact table of dual coefficients.

    Args:
        kernel: Tables in, ``[rows, support vectors]`` out.
        dual: ``[classes - 1, support vectors]``: what a support vector weighs against each other class.
        rows: ``[pairs, support vectors]``: the row of ``dual`` that a pair reads.
        takes_part: ``[pairs, support vectors]``: whether the support vector is of one of the pair's classes.
        intercept: ``[pairs]``.
    """

    rows: Tensor
    takes_part: Tensor

    def __init__(
        self,
        kernel: nn.Module,
        *,
        dual: npt.NDArray[np.float64],
        rows: npt.NDArray[np.int64],
        takes_part: npt.NDArray[np.bool_],
        intercept: npt.ArrayLike,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.dual = parameter(dual)
        self.intercept = parameter(intercept)
        self.register_buffer("rows", torch.from_numpy(rows))
        self.register_buffer("takes_part", torch.from_numpy(takes_part))

    def forward(self, x: Tensor) -> Tensor:
        """Return decision values ``[rows, pairs]``."""
        weights = torch.where(self.takes_part, self.dual.gather(0, self.rows), 0.0)
        result: Tensor = self.kernel(x) @ weights.T + self.intercept
        return result


class SupportVectorClassifier(PredictorModule):
    """A classifier over the decision values of pairs.

    Args:
        body: Tables in, ``[rows, pairs]`` out, positive for the first class of a pair.
        is_one_vs_rest: ``decision_function`` gives one value per class; else, one per pair.
        breaks_ties: ``predict`` takes the largest of these; else the first class with most votes.
        sigmoids: Slopes and offsets of Platt's sigmoids (Advances in Large Margin Classifiers, 1999), each ``[pairs]``.
    """

    task: Task = "classification"
    first: Tensor
    second: Tensor
    pairs: Tensor

    def __init__(
        self,
        body: nn.Module,
        *,
        classes: Sequence[object],
        answers: Sequence[str],
        is_one_vs_rest: bool,
        breaks_ties: bool,
        sigmoids: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    ) -> None:
        super().__init__(classes=classes, answers=answers)
        self.body = body
        self.is_one_vs_rest = is_one_vs_rest
        self.breaks_ties = breaks_ties
        num_classes = len(classes)
        pairs = list(combinations(range(num_classes), 2))
        members = torch.eye(num_classes, dtype=torch.float64)
        self.register_buffer("first", members[[first for first, _ in pairs]])  # [pairs, classes]
        self.register_buffer("second", members[[second for _, second in pairs]])
        indices = torch.full((num_classes, num_classes), 2 * len(pairs))  # the diagonal reads a zero
        for number, (first, second) in enumerate(pairs):
            indices[first, second], indices[second, first] = number, len(pairs) + number
        self.register_buffer("pairs", indices.flatten())
        if sigmoids is not None:
            self.slope, self.shift = (parameter(part) for part in sigmoids)

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for two classes, else ``[rows, classes]`` or ``[rows, pairs]``."""
        if len(self.classes) == 2:
            return -scores.squeeze(1)
        return self._one_vs_rest(scores) if self.is_one_vs_rest else scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``; equal values go to a pair's second class, equal votes to the first."""
        if self.breaks_ties:
            return self._one_vs_rest(scores).argmax(dim=1)
        wins = (scores > 0).to(self.first.dtype)
        return (wins @ self.first + (1 - wins) @ self.second).argmax(dim=1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        first = torch.sigmoid(-(scores * self.slope + self.shift))
        first = first.clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
        beside = torch.cat([first, 1 - first, torch.zeros_like(first[:, :1])], dim=1)
        return couple(beside.index_select(1, self.pairs).reshape(-1, len(self.classes), len(self.classes)))

    def _one_vs_rest(self, scores: Tensor) -> Tensor:
        """Return votes; sums of decision values, squeezed into a third of a vote, decide between equals."""
        loses = (scores < 0).to(scores.dtype)
        votes = (1 - loses) @ self.first + loses @ self.second
        sums = scores @ (self.first - self.second)
        return votes + sums / (3 * (sums.abs() + 1))


def couple(pairwise: Tensor) -> Tensor:
    """Compute probabilities of classes from those within pairs (Wu, Lin and Weng, JMLR 5, 2004).

    The values are libsvm's. The gradient is that of the minimum which libsvm's rounds approach: they stop early, and
    where they stop before the first round the result does not depend on the pairs at all.

    Args:
        pairwise: ``[rows, classes, classes]``: of the row's class against the column's, zero on the diagonal.

    Returns:
        ``[rows, classes]``.

    Example:
        >>> couple(torch.tensor([[[0.0, 0.5], [0.5, 0.0]]])).tolist()
        [[0.5, 0.5]]
    """
    quadratic = torch.diag_embed((pairwise * pairwise).sum(dim=1)) - pairwise * pairwise.transpose(1, 2)
    p = _libsvm_rounds(quadratic.detach())
    if torch.compiler.is_compiling() or not quadratic.requires_grad:
        return p
    minimum = _minimum(quadratic)
    return p + (minimum - minimum.detach())


def _minimum(quadratic: Tensor) -> Tensor:
    """Find the p of sum 1 that minimises p Q p: their equation 21, ``Q p + b = 0`` with the multiplier b."""
    bordered = torch.nn.functional.pad(quadratic, (0, 1, 0, 1), value=1.0)
    border = torch.zeros_like(bordered[:, 0])
    border[:, -1] = 1.0
    solution: Tensor = torch.linalg.solve(bordered - torch.diag_embed(border), border)
    return solution[:, :-1]


def _libsvm_rounds(quadratic: Tensor) -> Tensor:
    """Run their algorithm 2, stopped where libsvm stops it, row by row: its tolerance is visible in the result.

    An exported graph holds all 100 rounds, as it cannot stop early.
    """
    num_classes = quadratic.shape[1]
    units = torch.eye(num_classes, dtype=quadratic.dtype, device=quadratic.device).unbind()
    curvatures = quadratic.diagonal(dim1=1, dim2=2).unsqueeze(2).unbind(1)
    columns = quadratic.unbind(1)
    p = torch.full_like(quadratic[:, 0], 1 / num_classes)
    is_open = torch.ones_like(p[:, :1], dtype=torch.bool)
    for _ in range(max(COUPLING_ROUNDS, num_classes)):
        gradient = (quadratic * p.unsqueeze(1)).sum(dim=2)
        errors = gradient - (p * gradient).sum(dim=1, keepdim=True)
        is_open = is_open & (errors.abs().amax(dim=1, keepdim=True) >= 0.005 / num_classes)
        if not torch.compiler.is_compiling() and not is_open.any():
            break  # saves time only: closed rows do not move
        for unit, curvature, column, t in zip(units, curvatures, columns, range(num_classes), strict=True):
            step = ((p * gradient).sum(dim=1, keepdim=True) - gradient[:, t : t + 1]) / curvature
            step = torch.where(is_open, step, 0.0)
            total = 1 + step
            gradient = (gradient + step * column) / total
            p = (p + step * unit) / total
    return p
