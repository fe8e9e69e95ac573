"""Joint log-likelihoods of discrete naive Bayes: linear in counts, in bits, or by look-up of codes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn


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
        self.bias = nn.Parameter(torch.from_numpy(np.array(bias, np.float64)))
        self.register_buffer("start", torch.from_numpy(np.cumsum(counts) - counts))
        self.register_buffer("num_categories", torch.from_numpy(counts))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, classes]``; codes are cut to whole numbers, as the source does.

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
