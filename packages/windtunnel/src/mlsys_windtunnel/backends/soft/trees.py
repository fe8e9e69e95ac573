"""Soft trees: what :class:`~mlsys_windtunnel.modules.tree.trees.Trees` becomes for training (section 5.2.2).

A split's output is ``tanh(weight . columns - threshold)``, the inverse temperature folded into both; a leaf's weight
follows from the splits above it; the answer is the sum of leaf values times weights, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.backends.soft.native import is_native, sums
from mlsys_windtunnel.backends.soft.options import Gate, SoftOptions
from mlsys_windtunnel.backends.soft.plan import NONE, ColumnStatistics, SoftGroup, group_trees, recentred
from mlsys_windtunnel.modules.base import OperatorModule
from mlsys_windtunnel.modules.native import ZERO
from mlsys_windtunnel.modules.tree.ensemble import TreeEnsemble
from mlsys_windtunnel.modules.tree.trees import Trees
from torch import Tensor, nn

CATEGORY = 2.0  # how sure a split by categories is to begin with: tanh(2) = .96


class SoftColumns(nn.Module):
    """Map from the table that trees read, ``[rows, columns]``, to what their splits read.

    A split by categories has a column of its own after the others: a number for each category, below zero for
    those that go left.

    Args:
        ensemble: The trees.
        statistics: Statistics of the columns.
        trains_categories: True makes these numbers parameters.
    """

    mean: Tensor  # [columns] float64, as the next
    inverse_deviation: Tensor
    zero_is_missing: Tensor  # [columns] bool
    is_unknown_below_zero = False  # files of before have no such field

    def __init__(self, ensemble: TreeEnsemble, statistics: ColumnStatistics, *, trains_categories: bool) -> None:
        super().__init__()
        zero = np.zeros(ensemble.num_features, bool)
        zero[list(ensemble.zero_is_missing)] = True
        self.register_buffer("mean", torch.from_numpy(statistics.mean.copy()))
        self.register_buffer("inverse_deviation", torch.from_numpy(1 / statistics.deviation))
        self.register_buffer("zero_is_missing", torch.from_numpy(zero))
        self.has_zero_missing = bool(zero.any())
        self.is_unknown_below_zero = ensemble.rounds_to_float32  # XGBoost: a category that no set holds
        self.categorical = [int(feature) for feature in ensemble.categorical_features]
        self.tables = nn.ParameterList()  # of each categorical feature, [codes + 2, splits]: unknown codes, missing
        for feature in self.categorical:
            splits = np.flatnonzero((ensemble.feature == feature) & (ensemble.category_set >= 0))
            size = max(int(np.diff(ensemble.category_start[ensemble.category_set[split] :][:2])[0]) for split in splits)
            codes = np.append(np.arange(size + 1.0), np.nan)
            left = ensemble.goes_left(splits, codes).T
            table = torch.from_numpy(np.where(left, -CATEGORY, CATEGORY).astype(np.float32))
            self.tables.append(nn.Parameter(table, requires_grad=trains_categories))

    @staticmethod
    def column_of_split(ensemble: TreeEnsemble) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the column that each split reads, ``[splits]``."""
        column = ensemble.feature.copy()
        start = ensemble.num_features
        for feature in ensemble.categorical_features:
            splits = np.flatnonzero((ensemble.feature == feature) & (ensemble.category_set >= 0))
            column[splits] = start + np.arange(len(splits))
            start += len(splits)
        return column

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``[columns, rows]`` float32, missing values as 0, and where they are (``None``: nowhere)."""
        if self.has_zero_missing:
            x = x.masked_fill((x.detach().abs() <= ZERO) & self.zero_is_missing, torch.nan)
        columns = ((x - self.mean) * self.inverse_deviation).float()
        missing = columns.detach().isnan()
        if self.tables:
            missing[:, self.categorical] = False
            codes = [
                self._codes(x[:, feature], table) for feature, table in zip(self.categorical, self.tables, strict=True)
            ]
            learnt = [table[code] for table, code in zip(self.tables, codes, strict=True)]
            columns = torch.cat([columns, *learnt], dim=1)
            missing = torch.cat([missing, missing.new_zeros(len(x), columns.shape[1] - missing.shape[1])], dim=1)
            columns = torch.nan_to_num(columns)  # a missing category has a number; its own column is read by none
        if not torch.compiler.is_compiling() and not missing.any():  # a program has no such branch
            return columns.t().contiguous(), None
        return columns.masked_fill(missing, 0.0).t().contiguous(), missing.t()

    def _codes(self, column: Tensor, table: Tensor) -> Tensor:
        """Return rows of a table, as the exact form reads categories: whole parts, those below 0 and NaN missing."""
        column, last = column.detach(), len(table) - 1
        code = column.trunc()
        if self.is_unknown_below_zero:
            code = code.masked_fill(column < 0, last - 1)
        return torch.where(code >= 0, code.clamp(max=last - 1), last).long()


ABSENT = 1e4  # literals of a leaf that is not there
MISSING = 20.0  # where missing values go is not smooth: tanh of it is 1
DENSE_COLUMNS = 512  # up to so many, a weight for each split and column
DEFAULT_RANK = 32
MOST_LITERALS = 2**28  # numbers


def leaf_weights(
    splits: Tensor, path: Tensor, count: Tensor, *, gate: Gate, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return the weight of each leaf for each row, ``[trees, leaves, rows]``.

    Args:
        splits: Before tanh, ``[trees, splits, rows]``.
        path: Literals, ``[trees, leaves, splits]``.
        count: Number of literals of each leaf, ``[trees, leaves]``; huge for a leaf that is not there.
        gate: See :class:`~.options.SoftOptions`.
        scale: The inverse temperature of leaves.
        dropout: Share of outputs dropped; 0 outside of training.
    """
    output = torch.tanh(splits)
    if dropout:
        output = nn.functional.dropout(output, dropout)
    offset = count - 1 if gate == "tanh" else count
    sums = torch.baddbmm(offset.unsqueeze(2), path, output, beta=-scale, alpha=scale)
    weights = (sums.tanh() + 1) / 2 if gate == "tanh" else sums.softmax(dim=1)
    return nn.functional.dropout(weights, dropout) if dropout else weights


class SoftGroupParameters(nn.Module):
    """Trees of one size: their literals and leaf values.

    Args:
        group: The trees.
        leaf_value: Leaf values of the ensemble, ``[leaves, outputs]``.
        trains_paths: True makes literals and their counts parameters (L4).
    """

    path: Tensor  # [trees, leaves, splits]
    count: Tensor  # [trees, leaves]
    trees: Tensor  # [trees]: indices in the ensemble
    left: Tensor  # [trees, splits] int32: child of a split, a split of the tree or ~leaf
    right: Tensor
    num_splits: Tensor  # [trees] int32

    def __init__(self, group: SoftGroup, leaf_value: npt.NDArray[np.float64], *, trains_paths: bool) -> None:
        super().__init__()
        path = group.literals()
        count = np.abs(path).sum(axis=2)
        count[group.leaves == NONE] = ABSENT
        values = np.where((group.leaves == NONE)[:, :, None], 0.0, leaf_value[group.leaves])
        self.output = group.output
        self.leaf = nn.Parameter(torch.from_numpy(values.astype(np.float32)))  # [trees, leaves, outputs]
        for name, table in (("path", path), ("count", count.astype(np.float32))):
            if trains_paths:
                self.register_parameter(name, nn.Parameter(torch.from_numpy(table)))
            else:
                self.register_buffer(name, torch.from_numpy(table))
        self.register_buffer("trees", torch.from_numpy(group.trees))
        for name, children in (("left", group.left), ("right", group.right)):
            self.register_buffer(name, torch.from_numpy(children.astype(np.int32)))
        num_splits = (group.splits != NONE).sum(axis=1)
        self.register_buffer("num_splits", torch.from_numpy(num_splits.astype(np.int32)))


class SoftTrees(OperatorModule):
    """``bias + sum over trees and leaves of weight * value``, trainable at one of the paper's four levels.

    Args:
        trees: The exact form.
        statistics: Statistics of the columns that the trees read.
        options: Level, gate, temperatures, dropout, rank.

    Attributes:
        sharpness: Factor of inverse temperatures.

    Raises:
        InvalidInputError: the trees are too large for tables of leaves by splits.
    """

    feature: Tensor  # [splits]: the column that each reads
    leaf_order: Tensor  # [leaves of the ensemble]: where each is among the groups' leaves
    scale: Tensor  # [splits] float32: how steep each is; 0 where there is none
    missing: Tensor  # [splits] float32: a split's argument where the value is missing

    def __init__(self, trees: Trees, statistics: ColumnStatistics, options: SoftOptions) -> None:
        super().__init__()
        ensemble = trees.ensemble
        groups = group_trees(ensemble, num_groups=trees.num_groups)
        _check_size(groups)
        self.level, self.gate, self.dropout = options.number, options.gate, options.dropout
        self.leaf_scale, self.sharpness = options.leaf_scale, 1.0
        self.num_trees = ensemble.num_trees
        self.width = trees.num_groups if trees.num_groups > 1 else ensemble.num_outputs
        self.columns = SoftColumns(ensemble, statistics, trains_categories=self.level >= 2)
        indices = np.concatenate([group.splits.reshape(-1) for group in groups])

        def of_splits(values: npt.NDArray[np.float64]) -> Tensor:
            return torch.from_numpy(np.append(values, 0.0)[indices].astype(np.float32))  # NONE is the last

        threshold, margin = recentred(ensemble, statistics)
        mean, deviation = statistics.mean[ensemble.feature], statistics.deviation[ensemble.feature]
        steepness = deviation / np.maximum(options.temperature * deviation, margin / 2)
        offset = steepness * (threshold - mean) / deviation
        is_category = ensemble.category_set >= 0
        column = SoftColumns.column_of_split(ensemble)
        self.register_buffer("feature", torch.from_numpy(np.append(column, 0)[indices]))
        self.register_buffer("scale", of_splits(np.where(is_category, 1.0, steepness)))
        self.register_buffer("missing", of_splits(np.where(ensemble.missing_left, -MISSING, MISSING)))
        self.threshold = nn.Parameter(
            of_splits(np.where(is_category, 0.0, offset)), requires_grad=self.level >= 2
        )  # [splits], of columns times scale
        self._make_features(options.rank, ensemble.num_features + int(is_category.sum()))
        self.groups = nn.ModuleList(
            SoftGroupParameters(group, ensemble.leaf_value / trees.divisor, trains_paths=self.level == 4)
            for group in groups
        )
        leaves = np.concatenate([group.leaves.reshape(-1) for group in groups])
        order = np.argsort(leaves, kind="stable")[np.count_nonzero(leaves == NONE) :]
        self.register_buffer("leaf_order", torch.from_numpy(order), persistent=False)
        bias = np.zeros(self.width) if trees.bias is None else trees.bias.double().numpy(force=True) / trees.divisor
        self.bias = nn.Parameter(torch.from_numpy(np.broadcast_to(bias, self.width).astype(np.float32)))

    def _make_features(self, rank: int | None, num_columns: int) -> None:
        """Make the parameters of splits at L3 and L4: a weight for each split and column, or a low-rank correction."""
        self.weight: nn.Parameter | None = None  # [splits, columns]
        self.left: nn.Parameter | None = None  # [splits, rank]
        self.right: nn.Parameter | None = None  # [rank, columns]
        self.rank = 0
        if self.level < 3:
            return
        self.rank = (0 if num_columns <= DENSE_COLUMNS else DEFAULT_RANK) if rank is None else rank
        num_splits = len(self.feature)
        if self.rank:
            generator = torch.Generator().manual_seed(0)
            self.left = nn.Parameter(torch.randn(num_splits, self.rank, generator=generator) * 0.01)
            self.right = nn.Parameter(torch.zeros(self.rank, num_columns))
        else:
            weight = torch.zeros(num_splits, num_columns)
            weight[torch.arange(num_splits), self.feature] = self.scale
            self.weight = nn.Parameter(weight)

    def arguments(self, columns: Tensor, missing: Tensor | None) -> Tensor:
        """Return the arguments of ``tanh``, ``[splits, rows]``, for the output of :class:`SoftColumns`."""
        if self.weight is not None:
            result = torch.addmm(-self.threshold.unsqueeze(1), self.weight, columns)
        else:
            result = torch.addcmul(
                -self.threshold.unsqueeze(1), columns.index_select(0, self.feature), self.scale.unsqueeze(1)
            )
            if self.left is not None and self.right is not None:
                result = result + self.left @ (self.right @ columns)
        if missing is not None:
            result = torch.where(missing.index_select(0, self.feature), self.missing.unsqueeze(1), result)
        return result

    def weights(self, x: Tensor) -> Iterator[tuple[SoftGroupParameters, Tensor]]:
        """Yield each group with the weights of its leaves for each row, ``[trees, leaves, rows]``."""
        arguments = self.arguments(*self.columns(x))
        if self.sharpness != 1:
            arguments = arguments * self.sharpness
        for group, part in zip(self._groups, torch.split(arguments, self._sizes), strict=True):
            yield (
                group,
                leaf_weights(
                    part.view(group.path.shape[0], group.path.shape[2], -1),
                    group.path,
                    group.count,
                    gate=self.gate,
                    scale=self.leaf_scale * self.sharpness,
                    dropout=self.dropout if self.training else 0.0,
                ),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return scores ``[rows, outputs]`` in the dtype of ``x`` ``[rows, columns]``."""
        outputs: list[Tensor | None] = [None] * (self.width if self._groups[0].output is not None else 1)
        for group, part in self._sums(x):
            known = outputs[group.output or 0]
            outputs[group.output or 0] = part if known is None else known + part
        scores = torch.cat([output for output in outputs if output is not None]).t() + self.bias
        return scores.to(x.dtype)

    def _sums(self, x: Tensor) -> Iterator[tuple[SoftGroupParameters, Tensor]]:
        """Yield each group with its part of the scores, ``[outputs, rows]``."""
        if not is_native(x, drops=bool(self.dropout) and self.training):
            for group, weights in self.weights(x):
                yield group, group.leaf.reshape(-1, group.leaf.shape[2]).t() @ weights.flatten(0, 1)
            return
        columns, missing = self.columns(x)
        splits = {"feature": self.feature, "scale": self.scale, "threshold": self.threshold}
        shared: dict[str, Tensor | None] = {"columns": columns, "missing": missing}
        if self.level >= 3:
            splits, shared = {"arguments": self.arguments(columns, missing)}, {}
        else:
            splits["missing_value"] = self.missing
        is_one = len(self.groups) == 1  # then splitting would copy gradients for nothing
        options = (self.gate == "tanh", self.sharpness, self.leaf_scale * self.sharpness)
        parts = [[each] if is_one else torch.split(each, self._sizes) for each in splits.values()]
        for group, *own in zip(self._groups, *parts, strict=True):
            inputs = {**shared, **dict(zip(splits, own, strict=True))}
            yield group, sums(options, inputs, self._tensors(group), trains_columns=columns.requires_grad)

    def _tensors(self, group: SoftGroupParameters) -> dict[str, Tensor | None]:
        """Return a group's tensors as the kernel takes them."""
        path = group.path if self.level == 4 else None
        names = ("left", "right", "num_splits", "count", "leaf")
        return {"path": path, **{name: getattr(group, name) for name in names}}

    def leaf_weights(self, x: Tensor) -> Tensor:
        """Return the weight of each leaf of the ensemble for each row, ``[rows, leaves]`` in the dtype of ``x``."""
        together = torch.cat([weights.flatten(0, 1) for _, weights in self.weights(x)])
        return together.index_select(0, self.leaf_order).t().to(x.dtype)

    def tree_values(self, x: Tensor) -> Tensor:
        """Return the answer of each tree, ``[rows, trees, outputs]``."""
        parts, indices = [], []
        for group, weights in self.weights(x):
            parts.append(torch.einsum("tlk,tlb->btk", group.leaf, weights))
            indices.append(group.trees)
        order = torch.cat(indices).argsort()
        values = torch.cat(parts, dim=1)[:, order]
        return values.to(x.dtype)

    def randomise(self, generator: torch.Generator) -> None:
        """Draw the parameters that this level trains anew, for columns of deviation 1, as a cold start."""

        def draw(tensor: Tensor | None, deviation: float) -> None:
            if tensor is not None:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * deviation)

        with torch.no_grad():
            if self.weight is not None:
                draw(self.weight, 1.5 / math.sqrt(self.weight.shape[1]))
            if self.level >= 2:
                draw(self.threshold, 1.0)
                for table in self.columns.tables:
                    draw(table, 1.0)
            for group in self._groups:
                draw(group.leaf, 0.02)
                if self.level == 4:
                    draw(group.path, 1 / math.sqrt(group.path.shape[2]))
                    group.count.masked_fill_(group.count < ABSENT, 0.0)
            self.bias.zero_()

    @property
    def _sizes(self) -> list[int]:
        """Splits of each group."""
        return [group.path.shape[0] * group.path.shape[2] for group in self._groups]

    @property
    def _groups(self) -> Sequence[SoftGroupParameters]:
        return self.groups  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """Return level, gate and sizes."""
        groups = " + ".join(f"{len(group.trees)} x {group.leaf.shape[1]}" for group in self._groups)
        trained = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        return (
            f"L{self.level}, gate={self.gate}, trees x leaves: {groups}, columns={len(self.columns.mean)}, "
            f"rank={self.rank}, leaf_scale={self.leaf_scale:g}, sharpness={self.sharpness:g}, trainable={trained:,}"
        )


def _check_size(groups: Sequence[SoftGroup]) -> None:
    literals = sum(len(group.trees) * group.leaves.shape[1] * group.splits.shape[1] for group in groups)
    if literals > MOST_LITERALS:
        most = max(group.leaves.shape[1] for group in groups)
        raise InvalidInputError(
            f"{sum(len(group.trees) for group in groups)} trees of up to {most:,} leaves have {literals:,} pairs of a "
            f"leaf and a split, more than the {MOST_LITERALS:,} that soft mode keeps: fit fewer or smaller trees "
            "(max_leaf_nodes, num_leaves)"
        )
