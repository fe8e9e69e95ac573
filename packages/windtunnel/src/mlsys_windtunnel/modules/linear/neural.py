"""Multi-layer perceptrons, several labels at once, and the answer that is always the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task
from mlsys_windtunnel.modules.linear.linear import Affine
from torch import Tensor, nn

Activation = Literal["identity", "logistic", "tanh", "relu", "exp"]


class Layers(nn.Module):
    """Affine maps with an activation between them.

    Args:
        weights: Weights of each layer, ``[inputs, outputs]``.
        biases: ``[outputs]`` each.
        hidden: Activation after every layer but the last.
        last: Activation after the last.
    """

    def __init__(
        self,
        weights: Sequence[npt.NDArray[np.float64]],
        biases: Sequence[npt.NDArray[np.float64]],
        *,
        hidden: Activation,
        last: Activation = "identity",
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Affine(weight.T, bias) for weight, bias in zip(weights, biases, strict=True))
        self.hidden: Activation = hidden
        self.last: Activation = last

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, outputs]``."""
        for number, layer in enumerate(self.layers, start=1):
            x = activate(layer(x), self.last if number == len(self.layers) else self.hidden)
        return x


class MultilabelProbabilities(PredictorModule):
    """A logistic probability for each label, which is set where it is above one half.

    Args:
        body: Tables in, margins ``[rows, labels]`` out.
    """

    task: Task = "multilabel"

    def __init__(self, body: nn.Module) -> None:
        super().__init__(answers=("predict", "predict_proba", "predict_log_proba"))
        self.body = body

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return probabilities ``[rows, labels]``."""
        return scores.sigmoid()

    def prediction(self, scores: Tensor) -> Tensor:
        """Return 0 or 1 for each label, ``[rows, labels]`` int64."""
        return (scores > 0).long()


class Constant(nn.Module):
    """The same row whatever comes in: ``values`` are ``[outputs]``."""

    def __init__(self, values: npt.ArrayLike) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.from_numpy(np.array(values, np.float64).ravel()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the constant for each row, ``[rows, outputs]``."""
        return self.values.expand(x.shape[0], -1)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of each number."""
    if activation == "identity":
        return x
    if activation == "logistic":
        return x.sigmoid()
    if activation == "tanh":
        return x.tanh()
    return x.relu() if activation == "relu" else x.exp()
