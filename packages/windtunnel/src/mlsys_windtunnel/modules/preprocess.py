"""Numeric preprocessing without a fitted scale: functions, thresholds, norms and products of columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mlsys_windtunnel.modules.base import OperatorModule

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "identity": torch.positive,
    "log": torch.log,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "square": torch.square,
}


class Elementwise(OperatorModule):
    """A function of each number, named as in :data:`FUNCTIONS`."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """As ``x``."""
        return FUNCTIONS[self.function](x)
