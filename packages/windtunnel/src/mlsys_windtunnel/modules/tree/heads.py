"""Around tree ensembles: categories to codes before them, linear models in leaves, heads over sums of leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import Classifier, Link, OperatorModule, PredictorModule, Regressor, Task, parameter
from mlsys_windtunnel.modules.linear.linear import Affine
from mlsys_windtunnel.modules.tree.trees import Trees
from torch import Tensor, nn

Decision = Literal["positive", "non-negative", "likeliest"]
Output = Literal["identity", "exp", "logistic", "log1p-exp", "signed-square", "softmax", "likeliest", "positive"]

OUTPUTS: dict[Output, Callable[[Tensor], Tensor]] = {
    "identity": lambda scores: scores,
    "exp": torch.exp,
    "logistic": torch.sigmoid,
    "log1p-exp": nn.functional.softplus,
    "signed-square": lambda scores: scores * scores.abs(),
    "softmax": lambda scores: scores.softmax(dim=1),
    "likeliest": lambda scores: scores.argmax(dim=1, keepdim=True).to(scores.dtype),
    "positive": lambda scores: (scores > 0).to(scores.dtype),
}


class TreeClassifier(Classifier):
    """A classifier over sums of leaves.

    Args:
        body: See :class:`Classifier`.
        classes: The labels; of a single one all rows are.
        link: See :class:`Classifier`.
        slope: Multiplies scores before the link.
        is_normalised: True divides probabilities of several classes by their sum (one-vs-rest).
        decides: For one margin: whether it must be ``positive`` or ``non-negative`` for the second class, or the class
            with the highest probability is answered (``likeliest``), so that rounding in the link decides as well.
    """

    def __init__(
        self,
        body: nn.Module,
        *,
        classes: Sequence[object],
        link: Link,
        answers: Sequence[str],
        slope: float = 1.0,
        is_normalised: bool = True,
        decides: Decision = "positive",
    ) -> None:
        super().__init__(body, classes=classes, link=link, answers=answers)
        self.slope = slope
        self.is_normalised = is_normalised
        self.decides: Decision = decides

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        if not self.is_normalised:
            return (scores * self.slope).sigmoid()
        return super().probabilities(scores * self.slope)

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        if len(self.classes) == 1:
            return torch.zeros_like(scores[:, 0], dtype=torch.int64)
        if self.decides == "likeliest":
            return self.probabilities(scores).argmax(dim=1)
        if self.decides == "non-negative" and scores.shape[1] == 1:
            return (scores.squeeze(1) >= 0).long()
        return super().prediction(scores)


class TreeOutputs(PredictorModule):
    """Classifiers of several targets in the same trees: a leaf holds the shares of all targets' classes, side by side.

    Args:
        trees: ``[rows, classes of all outputs]`` probabilities.
        outputs: The labels of each target.
    """

    task: Task = "multilabel"

    def __init__(self, trees: Trees, *, outputs: Sequence[Sequence[object]], answers: Sequence[str]) -> None:
        super().__init__(answers=answers)
        self.trees = trees
        self.outputs = tuple(tuple(labels) for labels in outputs)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        scores: Tensor = self.trees(x)
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return ``scores``, which are probabilities."""
        return scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows, outputs]`` int64."""
        each = torch.split(scores, [len(labels) for labels in self.outputs], dim=1)
        return torch.stack([part.argmax(dim=1) for part in each], dim=1)


class Mapped(OperatorModule):
    """The inverse of a link, elementwise, on a body's scores.

    Args:
        body: Tables in, ``[rows, outputs]`` out.
        output: Function applied to the scores.
        slope: Multiplies scores before.
    """

    def __init__(self, body: nn.Module, output: Output, *, slope: float = 1.0) -> None:
        super().__init__()
        self.body = body
        self.output: Output = output
        self.slope = slope

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return ``[rows, outputs]``."""
        return OUTPUTS[self.output](self.body(*inputs) * self.slope)


class RawScores(Regressor):
    """A classifier with an objective of the user's own, which answers raw scores whatever it is asked.

    Args:
        body: Tables in, ``[rows, groups]`` out.
    """

    def __init__(self, body: nn.Module, *, answers: Sequence[str]) -> None:
        super().__init__(body)
        self.answers = frozenset(answers)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return ``[rows]``, or ``[rows, groups]``."""
        return self.prediction(scores)

    def decision(self, scores: Tensor) -> Tensor:
        """Return ``[rows]``, or ``[rows, groups]``."""
        return self.prediction(scores)


class MarkedMissing(OperatorModule):
    """A body over tables in which a number stands for what is missing, beside NaN; compared as float32."""

    def __init__(self, body: nn.Module, marker: float) -> None:
        super().__init__()
        self.body = body
        self.marker = float(np.float32(marker))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the body does."""
        scores: Tensor = self.body(x.masked_fill(x.float() == self.marker, torch.nan))
        return scores


class LinearBooster(OperatorModule):
    """XGBoost's ``gblinear``: an affine map in which a missing value adds nothing.

    Args:
        weight: ``[groups, features]``.
        bias: ``[groups]``.
    """

    def __init__(self, weight: npt.ArrayLike, bias: npt.ArrayLike) -> None:
        super().__init__()
        self.affine = Affine(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return margins ``[rows, groups]``."""
        margins: Tensor = self.affine(torch.where(x.isnan(), 0, x))
        return margins


class Margin(OperatorModule):
    """The second class's score less the first's, ``[rows, 1]``."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Tensor) -> Tensor:
        """See the class."""
        scores: Tensor = self.body(*inputs)
        return scores[:, 1:] - scores[:, :1]


class LeafIndicators(OperatorModule):
    """Weight of each leaf of all trees for a row, ``[rows, leaves]``: 1 or 0 while the trees are exact.

    Args:
        trees: Exact; softening puts soft ones in their place.
    """

    def __init__(self, trees: Trees) -> None:
        super().__init__()
        self.trees = trees

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.trees.leaf_weights(x)


class IsolationScores(OperatorModule):
    """Decision values of an isolation forest: ``-2 ** (-length / longest) - offset``.

    Args:
        trees: The sums of path lengths, ``[rows, 1]``.
        longest: Unit of the lengths; 0 after a fit on one row, by which all rows are 1.
        offset: The score at which outliers begin.
    """

    offset: Tensor

    def __init__(self, trees: Trees, *, longest: float, offset: float) -> None:
        super().__init__()
        self.trees = trees
        self.longest = longest
        self.register_buffer("offset", torch.tensor(offset, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores ``[rows, 1]``."""
        length = self.trees(x)
        share = length / self.longest if self.longest else torch.ones_like(length)
        return -torch.exp2(-share) - self.offset


class WeightedMedianOfTrees(OperatorModule):
    """The smallest of the trees' values at which half of all weight is reached.

    Args:
        trees: Trees of one output.
        weights: ``[trees]``.
    """

    weights: Tensor

    def __init__(self, trees: Trees, weights: npt.ArrayLike) -> None:
        super().__init__()
        self.trees = trees
        self.register_buffer("weights", torch.from_numpy(np.array(weights, np.float64)))

    def forward(self, x: Tensor) -> Tensor:
        """Return medians ``[rows, 1]``."""
        values, order = self.trees.tree_values(x).squeeze(2).sort(dim=1, stable=True)
        reached = self.weights[order].cumsum(dim=1)
        median = (reached >= 0.5 * reached[:, -1:]).long().argmax(dim=1, keepdim=True)
        return values.gather(1, median)


class CategoryCodes(OperatorModule):
    """Codes of some columns, then other columns as they are.

    Args:
        categories: Categories of each coded column, ascending and finite; the code is the index, NaN for any other.
        columns: The coded columns.
        others: The other columns.
    """

    categories: Tensor
    columns: Tensor
    others: Tensor

    def __init__(
        self, categories: Sequence[npt.NDArray[np.float64]], *, columns: npt.ArrayLike, others: npt.ArrayLike
    ) -> None:
        super().__init__()
        padded = np.full((len(categories), max(map(len, categories)) + 1), np.inf)
        for row, values in enumerate(categories):
            padded[row, : len(values)] = values
        self.register_buffer("categories", torch.from_numpy(padded))
        self.register_buffer("columns", torch.from_numpy(np.array(columns, np.int64)))
        self.register_buffer("others", torch.from_numpy(np.array(others, np.int64)))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, coded + others]``."""
        values = x.detach().index_select(1, self.columns).t().contiguous()
        index = torch.searchsorted(self.categories, values).clamp(max=self.categories.shape[1] - 1)
        is_known = (self.categories.gather(1, index) == values) & values.isfinite()
        codes = index.to(x.dtype).masked_fill(~is_known, torch.nan)
        return torch.cat([codes.t(), x.index_select(1, self.others)], dim=1)


class Coded(OperatorModule):
    """Trees over codes and numbers."""

    def __init__(self, codes: CategoryCodes, trees: Trees) -> None:
        super().__init__()
        self.codes = codes
        self.trees = trees

    def forward(self, x: Tensor) -> Tensor:
        """Return the trees' sums ``[rows, outputs]``."""
        sums: Tensor = self.trees(self.codes(x))
        return sums


ROWS_PER_BLOCK = 512  # rows that are answered at once: bounds the table [rows, trees, features of a leaf]


class LinearLeaves(OperatorModule):
    """Sums of the linear models of the leaves that a row reaches; a leaf's own value where a feature is missing.

    Args:
        trees: Of one value a leaf; its values answer rows that lack a feature of the leaf's model.
        constants: ``[leaves]``.
        features: Features of each leaf's model.
        coefficients: Coefficients of these.
    """

    features: Tensor
    is_used: Tensor
    group: Tensor  # [leaves]: the column of sums that a leaf adds to

    def __init__(
        self,
        trees: Trees,
        *,
        constants: npt.ArrayLike,
        features: Sequence[Sequence[int]],
        coefficients: Sequence[Sequence[float]],
    ) -> None:
        super().__init__()
        self.trees = trees
        self.num_groups = trees.num_groups
        most = max(1, *map(len, features))
        table, weight = np.zeros((len(features), most), np.int64), np.zeros((len(features), most))
        is_used = np.zeros((len(features), most), bool)
        for leaf, (read, factors) in enumerate(zip(features, coefficients, strict=True)):
            table[leaf, : len(read)], weight[leaf, : len(read)], is_used[leaf, : len(read)] = read, factors, True
        self.constant = parameter(constants)
        self.coefficient = nn.Parameter(torch.from_numpy(weight))
        self.register_buffer("features", torch.from_numpy(table))
        self.register_buffer("is_used", torch.from_numpy(is_used))
        sizes = np.diff(trees.leaf_start.numpy())
        self.register_buffer("group", torch.from_numpy(np.repeat(np.arange(len(sizes)) % self.num_groups, sizes)))

    def forward(self, x: Tensor) -> Tensor:
        """Return sums ``[rows, groups]``."""
        if not isinstance(cast(nn.Module, self.trees), Trees):
            return self._soft(x)
        if torch.compiler.is_compiling() or torch.is_grad_enabled():
            return self._exact(x)
        return torch.cat([self._exact(block) for block in torch.split(x, ROWS_PER_BLOCK)])

    def _exact(self, x: Tensor) -> Tensor:
        leaves = self.trees.leaves(x)
        features, is_used = self.features[leaves], self.is_used[leaves]
        read = x.gather(1, features.flatten(1)).reshape(features.shape)
        is_missing = (read.isnan() & is_used).any(dim=2)
        products = torch.where(is_used & ~is_missing.unsqueeze(2), read, 0) * self.coefficient[leaves]
        fallback = self.trees.leaf_value[:, 0][leaves]
        values = torch.where(is_missing, fallback, self.constant[leaves] + products.sum(dim=2))
        grouped = values.reshape(values.shape[0], -1, self.num_groups)
        return grouped.sum(dim=1) if torch.is_grad_enabled() else grouped.cumsum(dim=1)[:, -1]

    def _soft(self, x: Tensor) -> Tensor:
        """Compute sums of all leaves' models, weighted: what soft trees answer."""
        weights = self.trees.leaf_weights(x)
        read = x[:, self.features.flatten()].reshape(x.shape[0], *self.features.shape)
        read = torch.where(self.is_used & ~read.isnan(), read, 0)
        values = weights * (self.constant + (read * self.coefficient).sum(dim=2))
        return values.new_zeros(x.shape[0], self.num_groups).index_add(1, self.group, values)
