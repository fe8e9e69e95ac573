"""Networks beside trees: what a pipeline's boosted trees and a few small networks say of the same columns, summed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import OperatorModule
from torch import Tensor, nn


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
