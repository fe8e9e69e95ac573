"""Affine maps, and the heads of linear models that no other family has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule, Task
from torch import Tensor, nn


class Affine(OperatorModule):
    """``x @ weight.T + bias``; weight ``[outputs, features]``, bias ``[outputs]``."""

    def __init__(self, weight: npt.ArrayLike, bias: npt.ArrayLike) -> None:
        super().__init__()
        matrix = np.atleast_2d(np.asarray(weight, np.float64))
        self.weight = nn.Parameter(torch.from_numpy(matrix.copy()))
        self.bias = nn.Parameter(torch.from_numpy(np.broadcast_to(np.asarray(bias, np.float64), len(matrix)).copy()))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, outputs]``."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


class MultilabelMargins(PredictorModule):
    """One margin per label, each of which is set where its margin is positive.

    Args:
        body: Tables in, margins ``[rows, labels]`` out.
        answers: The methods of the source.
    """

    task: Task = "multilabel"

    def __init__(self, body: nn.Module, *, answers: Sequence[str]) -> None:
        super().__init__(answers=answers)
        self.body = body

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return margins, ``[rows, labels]``."""
        scores: Tensor = self.body(*inputs)
        return scores

    def decision(self, scores: Tensor) -> Tensor:
        """Return margins, ``[rows, labels]``."""
        return scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return 0 or 1 for each label, ``[rows, labels]`` int64."""
        return (scores > 0).long()
