"""Joins of members' answers: votes, means, medians, and answers that pass under other labels.

Each join is a predictor that takes one table for each member: its answers side by side, as :class:`Layout` tells them
apart. Calibration, and one-vs-rest and its kin, have files of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule, Task
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of a member's answers in its table."""

    methods: tuple[str, ...]  # in the order of graph.METHODS; the width of the last, decision_function, may be any
    num_classes: int = 0  # of a classifier; 0: the member answers one value table

    def take(self, table: Tensor, method: str) -> Tensor:
        """Return one answer, ``[rows, width]``."""
        start = 0
        for earlier in self.methods[: self.methods.index(method)]:
            start += self._width(earlier)
        return table[:, start:] if method == self.methods[-1] else table[:, start : start + self._width(method)]

    def score(self, table: Tensor) -> Tensor:
        """Return a binary classifier's score for its second class, ``[rows, 1]``; a regressor's value."""
        if "decision_function" in self.methods:
            return self.take(table, "decision_function")
        if "predict_proba" in self.methods:
            return self.take(table, "predict_proba")[:, 1:2]
        return self.take(table, "predict")

    def _width(self, method: str) -> int:
        return self.num_classes if "proba" in method else 1


class Ballot(OperatorModule):
    """A member's answer as shares of all classes: its probabilities, or 1 for the class it names.

    Args:
        layout: Layout of the member's table.
        class_indices: Index of each of the member's classes among all.
        num_classes: All classes.
    """

    places: Tensor  # class indices; saved files hold this name

    def __init__(self, layout: Layout, *, class_indices: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.layout = layout
        self.num_classes = num_classes
        self.is_complete = list(class_indices) == list(range(num_classes))
        self.register_buffer("places", torch.tensor(list(class_indices), dtype=torch.int64))

    def forward(self, table: Tensor) -> Tensor:
        """Return ``[rows, num_classes]``."""
        if "predict_proba" in self.layout.methods:
            shares = self.layout.take(table, "predict_proba")
            if self.is_complete:
                return shares
            return shares.new_zeros(shares.shape[0], self.num_classes).index_copy(1, self.places, shares)
        class_index = self.places[self.layout.take(table, "predict").long()]
        return (class_index == torch.arange(self.num_classes, device=class_index.device)).to(table.dtype)


class Vote(PredictorModule):
    """The class with the largest weighted mean of ballots, which are its probability.

    Args:
        ballots: One for each member.
        weights: One for each member; trained where the members vote by probabilities.
        answers: The methods of the source; ``decision_function`` is the mean of the members'.
    """

    task: Task = "classification"

    def __init__(
        self, ballots: Sequence[Ballot], *, weights: npt.ArrayLike, classes: Sequence[object], answers: Sequence[str]
    ) -> None:
        super().__init__(classes=classes, answers=answers)
        self.ballots = nn.ModuleList(ballots)
        self.mean = WeightedMean(weights, is_trainable="predict_proba" in answers)
        self.layouts = [ballot.layout for ballot in ballots]

    def forward(self, *tables: Tensor) -> Tensor:
        """Return ``[rows, classes]``, and the decision values where the source has them."""
        shares = self.mean(*(ballot(table) for ballot, table in zip(self.ballots, tables, strict=True)))
        if "decision_function" not in self.answers:
            return torch.as_tensor(shares)
        decisions = [
            layout.take(table, "decision_function") for layout, table in zip(self.layouts, tables, strict=True)
        ]
        return torch.cat([shares, self.mean(*decisions)], dim=1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        return scores[:, : len(self.classes)]

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for two classes, else ``[rows, k]``."""
        decisions = scores[:, len(self.classes) :]
        return decisions.squeeze(1) if decisions.shape[1] == 1 else decisions

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return self.probabilities(scores).argmax(dim=1)


class BoostedVote(PredictorModule):
    """AdaBoost's vote, SAMME: for the class a member names, and evenly against the others.

    Source: Zhu, Zou, Rosset, Hastie, "Multi-class AdaBoost", Statistics and Its Interface 2, 2009, algorithm 2; the
    probabilities are its equation 15.

    Args:
        ballots: One for each member.
        weights: One for each member.
        classes: The labels, at least two.
    """

    task: Task = "classification"

    def __init__(
        self, ballots: Sequence[Ballot], *, weights: npt.ArrayLike, classes: Sequence[object], answers: Sequence[str]
    ) -> None:
        super().__init__(classes=classes, answers=answers)
        self.ballots = nn.ModuleList(ballots)
        self.mean = WeightedMean(weights)

    def forward(self, *tables: Tensor) -> Tensor:
        """Return scores ``[rows, classes]``; ``[rows, 1]`` for two classes."""
        against = -1 / (len(self.classes) - 1)
        votes = [ballot(table) for ballot, table in zip(self.ballots, tables, strict=True)]
        scores: Tensor = self.mean(*(torch.where(vote > 0, 1.0, against).to(vote.dtype) for vote in votes))
        return scores[:, 1:] - scores[:, :1] if len(self.classes) == 2 else scores

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for two classes, else ``[rows, classes]``."""
        return scores.squeeze(1) if len(self.classes) == 2 else scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        if len(self.classes) == 2:
            return (torch.cat([-scores, scores], dim=1) / 2).softmax(dim=1)
        return (scores / (len(self.classes) - 1)).softmax(dim=1)

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return (scores.squeeze(1) > 0).long() if len(self.classes) == 2 else scores.argmax(dim=1)


class WeightedMean(OperatorModule):
    """The weighted mean of tables of the same width, summed in their order."""

    def __init__(self, weights: npt.ArrayLike, *, is_trainable: bool = True) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor(weights, dtype=torch.float64), requires_grad=is_trainable)

    def forward(self, *tables: Tensor) -> Tensor:
        """Return the weighted mean of the tables, in the shape of each."""
        total = tables[0] * self.weights[0]
        for number, table in enumerate(tables[1:], start=1):
            total = total + table * self.weights[number]
        return total / self.weights.sum()


class WeightedMedian(OperatorModule):
    """The least of the members' values at which half of the weight is reached, ``[rows, 1]``."""

    weights: Tensor

    def __init__(self, weights: npt.ArrayLike) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float64))

    def forward(self, *tables: Tensor) -> Tensor:
        """Return the weighted median ``[rows, 1]`` of tables of one column."""
        values, order = torch.cat(tables, dim=1).sort(dim=1, stable=True)
        reached = self.weights[order].cumsum(dim=1)
        is_enough = reached >= 0.5 * reached[:, -1:]
        return values.gather(1, is_enough.long().argmax(dim=1, keepdim=True))


class Passed(PredictorModule):
    """One member's answers under the labels of the whole.

    Args:
        layout: Layout of the member's table.
        classes: The labels of the whole.
        answers: The methods of the whole.
    """

    task: Task = "classification"

    def __init__(self, layout: Layout, *, classes: Sequence[object], answers: Sequence[str]) -> None:
        super().__init__(classes=classes, answers=answers)
        self.layout = layout

    def forward(self, table: Tensor) -> Tensor:
        """Return ``table``."""
        return table

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        return self.layout.take(scores, "predict_proba")

    def log_probabilities(self, scores: Tensor) -> Tensor:
        """Return logarithms of probabilities ``[rows, classes]``."""
        return self.layout.take(scores, "predict_log_proba")

    def decision(self, scores: Tensor) -> Tensor:
        """Return decision values: ``[rows]`` for one column, else ``[rows, k]``."""
        decisions = self.layout.take(scores, "decision_function")
        return decisions.squeeze(1) if decisions.shape[1] == 1 else decisions

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return self.layout.take(scores, "predict")[:, 0].long()


class Threshold(Passed):
    """A binary classifier whose second thoughts are a threshold: the positive class where the score reaches it.

    Args:
        layout: Layout of the member's table.
        method: Answer that is compared.
        threshold: With what.
        positive: The index of the positive class, which the score is for: 0 or 1.
        pair: Indices of the classes named below the threshold, and from it on.
    """

    threshold: Tensor

    def __init__(
        self,
        layout: Layout,
        *,
        method: Literal["predict_proba", "decision_function"],
        threshold: float,
        positive: int,
        pair: tuple[int, int],
        classes: Sequence[object],
        answers: Sequence[str],
    ) -> None:
        super().__init__(layout, classes=classes, answers=answers)
        self.method = method
        self.positive = positive
        self.pair = pair
        self.register_buffer("threshold", torch.tensor(threshold, dtype=torch.float64))

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        score = self.layout.take(scores, self.method)
        if self.method == "predict_proba":
            score = score[:, self.positive]
        else:
            score = score[:, 0] if self.positive else -score[:, 0]
        below, above = self.pair
        return (score >= self.threshold).long() * (above - below) + below


class Beside(OperatorModule):
    """Scores of trees plus those of networks, whose last layers hold their weights.

    Args:
        trees: Columns in, scores ``[rows, outputs]`` out.
        networks: Likewise.
        fill: Value that networks read where a column has none, ``[columns]``.
        low: Lowest value of each column that they read: what lies below counts as this.
        high: Highest likewise.
    """

    fill: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self,
        trees: nn.Module,
        networks: Sequence[nn.Module],
        *,
        fill: npt.NDArray[np.float64],
        low: npt.NDArray[np.float64],
        high: npt.NDArray[np.float64],
    ) -> None:
        super().__init__()
        self.trees = trees
        self.networks = nn.ModuleList(networks)
        for name, values in (("fill", fill), ("low", low), ("high", high)):
            self.register_buffer(name, torch.from_numpy(np.array(values, np.float64)))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, ``[rows, outputs]``."""
        scores: Tensor = self.trees(x)
        bounded = torch.minimum(torch.maximum(torch.where(x.isnan(), self.fill, x), self.low), self.high)
        for network in self.networks:
            scores = scores + network(bounded)
        return scores
