"""An outside model like DeepGBM (Ke et al., KDD 2019), which the dissertation compares with (section 5.4.1).

Two networks are trained together. *CatNN* reads categories: a linear term, pairwise products of embeddings (a
factorisation machine) and a small network on them. *GBDT2NN* reads the features that boosted trees use most: the leaves
that a row reaches in a group of trees are embedded in a few numbers, and a small network per group learns to predict
these from the features, so that it distils the trees. Small choices (sizes, rates) are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mlsys_bench.windtunnel.experiments.boosted import frame_of
from mlsys_bench.windtunnel.experiments.networks import tensors

if TYPE_CHECKING:
    from mlsys_bench.windtunnel.experiments.codes import Coded, CodedTask

NUM_GROUPS, LEAF_DIM, FACTOR_DIM, HIDDEN = 10, 20, 8, 64


class DeepGbm(nn.Module):
    """Scores ``[rows, 1]``.

    Args:
        task: Its training rows scale the numbers.
        trees: A LightGBM classifier fitted on :func:`tree_table`.
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
    leaves: npt.NDArray[np.int64] = trees.predict(tree_table(part, task), pred_leaf=True).astype(np.int64)
    return torch.from_numpy(leaves.reshape(len(part.target), -1))


def tree_table(part: Coded, task: CodedTask) -> Any:
    """Return the columns that the trees read: numbers and codes as numbers, or a preparation's columns alone."""
    return part.numbers if task.is_encoded else frame_of(part, task, "int64")


def _table(part: Coded) -> npt.NDArray[np.float32]:
    numbers, codes = tensors(part)
    return torch.cat([numbers, codes.float()], dim=1).numpy()


def _small(before: int, after: int) -> nn.Sequential:
    widths: Sequence[int] = (before, HIDDEN, HIDDEN)
    layers: list[nn.Module] = []
    for first, second in pairwise(widths):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, after))
