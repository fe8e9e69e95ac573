"""Affine maps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mlsys_windtunnel.modules.base import OperatorModule


class Affine(OperatorModule):
    """``x @ weight.T + bias``; weight ``[outputs, features]``, bias ``[outputs]``."""

    def __init__(self, weight: npt.ArrayLike, bias: npt.ArrayLike) -> None:
        super().__init__()
        matrix = np.atleast_2d(np.asarray(weight, np.float64))
        self.weight = nn.Parameter(torch.from_numpy(matrix.copy()))
        self.bias = nn.Parameter(torch.from_numpy(np.broadcast_to(np.asarray(bias, np.float64), len(matrix)).copy()))

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, outputs]``."""
        return torch.nn.functional.linear(x, self.weight, self.bias)
