"""Weights of the members of a sum, by answers to rows that they were not fitted on, near weights known before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from torch import Tensor

from mlsys_windtunnel.modules.tree.ensemble import Floats

PULL = 0.005  # loss that a squared distance of 1 from the prior costs, as a share of the loss of guessing


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the members, and what they gain on the rows."""

    weights: Floats  # [members], 0 or more, sum 1
    gain: float  # mean loss of the first member less that of the sum, over all rows
    gain_se: float


def weigh(
    scores: Tensor, losses: Callable[[Tensor], Tensor], prior: Floats, *, row_weights: Tensor, guess: float
) -> Weights:
    """Find the weights of least loss on a simplex.

    Args:
        scores: Of each member, the first the source, ``[members, rows, outputs]``.
        losses: Loss of each row, ``[rows]``, from scores ``[rows, outputs]``.
        prior: Weights where the rows say nothing, ``[members]``.
        row_weights: ``[rows]``.
        guess: Mean loss of one answer to all rows: the unit of losses.
    """

    def mean(values: Tensor) -> Tensor:
        return (values * row_weights).sum() / row_weights.sum()

    def objective(weights: Floats) -> tuple[float, Floats]:
        parts = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
        distance = (parts - torch.from_numpy(prior)).square().sum()
        loss = mean(losses(torch.einsum("m,mro->ro", parts, scores))) / guess + PULL * distance
        loss.backward()  # type: ignore[no-untyped-call]
        assert parts.grad is not None
        return float(loss.detach()), parts.grad.numpy()

    total = {"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": np.ones_like}
    options = {"ftol": 1e-10, "maxiter": 200}
    bounds = [(0.0, 1.0)] * len(prior)
    found = minimize(objective, prior, jac=True, bounds=bounds, constraints=total, method="SLSQP", options=options)
    weights = np.clip(found.x, 0, None) if np.isfinite(found.x).all() else prior
    weights = np.where(weights < 1e-3, 0.0, weights)
    weights /= weights.sum()
    with torch.no_grad():
        gains = losses(scores[0]) - losses(torch.einsum("m,mro->ro", torch.from_numpy(weights), scores))
        gain = mean(gains)
        share = row_weights / row_weights.sum()
        error = ((gains - gain).square() * share.square()).sum().sqrt()
    return Weights(weights, float(gain), float(error))
