"""Scalers: an elementwise affine map."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mlsys_windtunnel.modules.base import OperatorModule


class ElementwiseAffine(OperatorModule):
    """``(x - shift) / scale`` column by column."""

    def __init__(self, shift: npt.ArrayLike, scale: npt.ArrayLike) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.from_numpy(np.array(shift, np.float64)))
        self.scale = nn.Parameter(torch.from_numpy(np.array(scale, np.float64)))

    def forward(self, x: Tensor) -> Tensor:
        """As ``x``."""
        return (x - self.shift) / self.scale


def standard_scaler(estimator: Any) -> OperatorModule:
    """Mean and scale, each of which may be off."""
    width = estimator.n_features_in_
    shift = estimator.mean_ if estimator.with_mean else np.zeros(width)
    return ElementwiseAffine(shift, estimator.scale_ if estimator.with_std else np.ones(width))
