"""Outside models, networks: an MLP with embeddings, and TabM with piecewise-linear numbers.

The MLP is what the field calls the plain baseline. TabM (Gorishniy et al., 2024) is an ensemble of ``k`` MLPs that
share their weights but for a scale of each input and output (BatchEnsemble), trained side by side; each number is
written as how far it lies within each of its quantile bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mlsys_bench.windtunnel.experiments.sources import frame_of

if TYPE_CHECKING:
    from mlsys_bench.windtunnel.experiments.sources import Coded, CodedTask

NUM_GROUPS, LEAF_DIM, FACTOR_DIM, HIDDEN = 10, 20, 8, 64


class DeepGbm(nn.Module):
    """Scores ``[rows, 1]``.

    Args:
        task: Its training rows scale the numbers.
        trees: A LightGBM classifier fitted on numbers, and codes as numbers.
        num_features: Number of features that GBDT2NN reads: those that the trees gain most by.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, task: CodedTask, trees: Any, *, num_features: int = 64) -> None:
        super().__init__()
        self.factors = nn.ModuleList(nn.Embedding(size, FACTOR_DIM) for size in task.cardinalities)
        self.linear = nn.ModuleList(nn.Embedding(size, 1) for size in task.cardinalities)
        for factors, linear in zip(self.factors, self.linear, strict=True):
            assert isinstance(factors, nn.Embedding)
            assert isinstance(linear, nn.Embedding)
            nn.init.normal_(factors.weight, std=0.05)
            nn.init.zeros_(linear.weight)
        num_words, num_numbers = len(task.cardinalities), task.train.numbers.shape[1]
        self.deep = _small(num_words * FACTOR_DIM + num_numbers, 1)
        booster = trees.booster_
        gain = booster.feature_importance("gain")
        self.used = np.sort(np.argsort(-gain)[:num_features])
        table = _table(task.train)
        self.register_buffer("mean", torch.from_numpy(table.mean(axis=0)).float())
        self.register_buffer("deviation", torch.from_numpy(table.std(axis=0)).float().clamp(min=1e-9))
        num_trees = booster.num_trees()
        self.groups = [group.tolist() for group in np.array_split(np.arange(num_trees), min(NUM_GROUPS, num_trees))]
        largest = int(trees.get_params()["num_leaves"])
        self.leaf_start = torch.from_numpy(np.arange(num_trees) * largest)
        self.leaves = nn.Embedding(num_trees * largest, LEAF_DIM)
        nn.init.normal_(self.leaves.weight, std=0.05)
        self.distilled = nn.ModuleList(_small(len(self.used), LEAF_DIM) for _ in self.groups)
        self.out = nn.Parameter(torch.randn(len(self.groups), LEAF_DIM) * 0.1)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """See the class."""
        return (self._categories(numbers, codes) + self._groups(numbers, codes)[1]).unsqueeze(1)

    def loss(self, numbers: Tensor, codes: Tensor, leaves: Tensor, target: Tensor) -> Tensor:
        """Return the losses of the answer, of the one by leaves, and of predicting their embeddings, added up.

        ``leaves`` is ``[rows, trees]``.
        """
        predicted, score = self._groups(numbers, codes)
        embedded = self.leaves(leaves + self.leaf_start)  # [rows, trees, dim]
        reached = torch.stack([embedded[:, group].sum(1) for group in self.groups], dim=1)
        by_leaves = (reached * self.out).sum((1, 2)) + self.bias
        log_loss = nn.functional.binary_cross_entropy_with_logits
        distance = nn.functional.mse_loss(predicted, reached.detach())
        return log_loss(self._categories(numbers, codes) + score, target) + log_loss(by_leaves, target) + distance

    def _categories(self, numbers: Tensor, codes: Tensor) -> Tensor:
        embedded = torch.stack([table(codes[:, index]) for index, table in enumerate(self.factors)], dim=1)
        linear = torch.cat([table(codes[:, index]) for index, table in enumerate(self.linear)], dim=1).sum(1)
        pairs = (embedded.sum(1).square() - embedded.square().sum(1)).sum(1) / 2
        scaled = (numbers - self.mean[: numbers.shape[1]]) / self.deviation[: numbers.shape[1]]
        deep: Tensor = self.deep(torch.cat([scaled, embedded.flatten(1)], dim=1)).squeeze(1)
        return linear + pairs + deep

    def _groups(self, numbers: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        x = ((torch.cat([numbers, codes.float()], dim=1) - self.mean) / self.deviation)[:, self.used]
        predicted = torch.stack([network(x) for network in self.distilled], dim=1)
        return predicted, (predicted * self.out).sum((1, 2)) + self.bias


def leaf_indices(trees: Any, part: Coded, task: CodedTask) -> Tensor:
    """Return the leaf that each row reaches in each tree, ``[rows, trees]``."""
    leaves: npt.NDArray[np.int64] = trees.predict(frame_of(part, task, "int64"), pred_leaf=True).astype(np.int64)
    return torch.from_numpy(leaves.reshape(len(part.target), -1))


def _table(part: Coded) -> npt.NDArray[np.float32]:
    numbers, codes = tensors(part)
    return torch.cat([numbers, codes.float()], dim=1).numpy()


def _small(before: int, after: int) -> nn.Sequential:
    widths: Sequence[int] = (before, HIDDEN, HIDDEN)
    layers: list[nn.Module] = []
    for first, second in pairwise(widths):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, after))


NUM_BINS = 24


class Columns(nn.Module):
    """Numbers and embedded categories side by side, ``[rows, width]``.

    Args:
        train: Rows that numbers are scaled by.
        cardinalities: Number of codes of each column.
        num_bins: Quantile bins that each number is written in; None standardises numbers instead.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, train: Coded, cardinalities: Sequence[int], *, num_bins: int | None) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, min(16, round(1.6 * size**0.4))) for size in cardinalities)
        for embedding in self.embeddings:
            assert isinstance(embedding, nn.Embedding)
            nn.init.normal_(embedding.weight, std=0.1)
        self.register_buffer("mean", torch.from_numpy(train.numbers.mean(axis=0)).float())
        self.register_buffer("deviation", torch.from_numpy(train.numbers.std(axis=0)).float().clamp(min=1e-9))
        self.num_bins = num_bins
        self.edges: list[Tensor] = []
        if num_bins is not None:
            for index, column in enumerate(train.numbers.T):
                edges = np.unique(np.quantile(column, np.linspace(0, 1, num_bins + 1)))
                if len(edges) < 2:
                    edges = np.array([edges[0], edges[0] + 1])
                self.register_buffer(f"edges{index}", torch.from_numpy(edges).float())
                self.edges.append(getattr(self, f"edges{index}"))
        of_numbers = sum(len(edges) - 1 for edges in self.edges) if num_bins is not None else train.numbers.shape[1]
        self.width = of_numbers + sum(embedding.embedding_dim for embedding in self._embeddings)

    @property
    def _embeddings(self) -> Sequence[nn.Embedding]:
        return self.embeddings  # type: ignore[return-value]

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """See the class."""
        parts = [embedding(codes[:, index]) for index, embedding in enumerate(self._embeddings)]
        if self.num_bins is None:
            return torch.cat([(numbers - self.mean) / self.deviation, *parts], dim=1)
        written = [bin_shares(numbers[:, index], edges) for index, edges in enumerate(self.edges)]
        return torch.cat([*written, *parts], dim=1)


def bin_shares(column: Tensor, edges: Tensor) -> Tensor:
    """Return how far each number lies within each bin, ``[rows, bins]``.

    It is 1 where the number lies above the bin and 0 where it lies below; the outer bins go on linearly.
    """
    shares = (column.unsqueeze(1) - edges[:-1]) / (edges[1:] - edges[:-1])
    num_bins = len(edges) - 1
    low = torch.zeros(num_bins, device=column.device)
    high = torch.ones(num_bins, device=column.device)
    low[0], high[-1] = -math.inf, math.inf
    return shares.clamp(min=low, max=high)


class Mlp(nn.Module):
    """Two hidden layers on standardised numbers and embeddings; answers ``[rows, 1]``."""

    def __init__(self, train: Coded, cardinalities: Sequence[int], *, width: int = 192, dropout: float = 0.1) -> None:
        super().__init__()
        self.columns = Columns(train, cardinalities, num_bins=None)
        layers: list[nn.Module] = []
        for before in (self.columns.width, width):
            layers += [nn.Linear(before, width), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """See the class."""
        scores: Tensor = self.layers(self.columns(numbers, codes))
        return scores


class SharedLinear(nn.Module):
    """``k`` linear layers of one weight: member i has scales of its own for inputs and outputs, and a bias.

    Args:
        before: Width of the input.
        after: Width of the output.
        members: ``k``.
        has_signs: True starts input scales as random signs, which sets the members apart; else all start at 1.
    """

    def __init__(self, before: int, after: int, members: int, *, has_signs: bool = False) -> None:
        super().__init__()
        bound = 1 / math.sqrt(before)
        self.weight = nn.Parameter(torch.empty(after, before).uniform_(-bound, bound))
        scale = torch.randint(0, 2, (members, before)).float() * 2 - 1 if has_signs else torch.ones(members, before)
        self.scale_in = nn.Parameter(scale)
        self.scale_out = nn.Parameter(torch.ones(members, after))
        self.bias = nn.Parameter(torch.empty(members, after).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, members, after]`` from ``[rows, members, before]``."""
        return nn.functional.linear(x * self.scale_in, self.weight) * self.scale_out + self.bias


class TabM(nn.Module):
    """``members`` MLPs that share weights; answers ``[rows, members]``, a score of each."""

    def __init__(
        self, train: Coded, cardinalities: Sequence[int], *, members: int = 8, width: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.members = members
        self.columns = Columns(train, cardinalities, num_bins=NUM_BINS)
        layers: list[nn.Module] = []
        for index, before in enumerate((self.columns.width, width)):
            layers += [SharedLinear(before, width, members, has_signs=index == 0), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Parameter(torch.randn(members, width) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(members))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """See the class."""
        x = self.columns(numbers, codes).unsqueeze(1).expand(-1, self.members, -1)
        scores: Tensor = (self.layers(x) * self.head).sum(2) + self.bias
        return scores


def tensors(part: Coded) -> tuple[Tensor, Tensor]:
    """Return numbers in float32 and codes."""
    return torch.from_numpy(part.numbers.astype(np.float32)), torch.from_numpy(part.codes)


def probabilities(scores: Tensor) -> npt.NDArray[np.float64]:
    """Return the members' mean probability, ``[rows]``."""
    return scores.sigmoid().mean(dim=1).double().numpy(force=True)
