"""Weights of several answers, by their loss on rows that none of them has learnt from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mlsys_windtunnel.finetune.options import RowLoss

PRIOR_ROWS = 100.0  # rows that speak for one answer alone


@dataclass(frozen=True, slots=True)
class Blend:
    """Weights of answers."""

    weights: npt.NDArray[np.float64]  # [answers], 0 or more
    shift: npt.NDArray[np.float64]  # [outputs]: added to the weighted margins
    gain: float  # fall of the mean loss below the first answer's
    gain_se: float  # its standard error over the rows


def blend(margins: Tensor, target: Tensor, weight: Tensor, loss: RowLoss, *, towards: int = 0) -> Blend:
    """Find weights that the rows' loss is lowest at, drawn towards one answer alone.

    Args:
        margins: ``[rows, answers, outputs]`` float64, of rows that the answers had not learnt from.
        target: As the loss takes it.
        weight: ``[rows]``.
        loss: Margins ``[rows, outputs]`` and targets to losses ``[rows]``.
        towards: Index of the answer that few rows leave most of the weight to.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    num_answers, num_outputs = margins.shape[1:]
    shares = weight / weight.sum()
    strength = PRIOR_ROWS / (PRIOR_ROWS + float(weight.sum()))
    alone = torch.zeros(num_answers, dtype=torch.float64)
    alone[towards] = 1.0
    scale = float(margins[:, 0].std(dim=0, correction=0).mean()) or 1.0
    before = loss(margins[:, 0], target)

    def together(values: Tensor) -> Tensor:
        return torch.einsum("rao,a->ro", margins, values[:num_answers]) + values[num_answers:]

    def objective(values: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        parameters = torch.tensor(values, requires_grad=True)
        distance = (parameters[:num_answers] - alone).square().sum() + parameters[num_answers:].square().sum()
        value = (loss(together(parameters), target) * shares).sum() + strength * scale**2 * distance / 8
        (gradient,) = torch.autograd.grad(value, parameters)
        return value.item(), gradient.numpy()

    start = np.append(alone.numpy(), np.zeros(num_outputs))
    bounds = [(0.0, None)] * num_answers + [(None, None)] * num_outputs
    found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    gains = before - loss(together(torch.from_numpy(found)), target)
    mean = float((gains * shares).sum())
    error = float(((gains - mean).square() * shares.square()).sum().sqrt())
    return Blend(found[:num_answers], found[num_answers:], mean, error)
