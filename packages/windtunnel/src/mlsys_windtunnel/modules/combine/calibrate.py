"""Calibrated classifiers: scores through a sigmoid, a temperature or isotonic regression, which is here too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import PredictorModule, Task, parameter
from mlsys_windtunnel.modules.combine.combine import Layout
from torch import Tensor, nn

Outside = Literal["clip", "nan"]


def interp(x: Tensor, knots: Tensor, values: Tensor, *, outside: Outside = "clip") -> Tensor:
    """Interpolate linearly, as ``numpy.interp`` for ``clip`` and ``scipy.interpolate.interp1d`` for ``nan``.

    Args:
        x: Points at which the function is read, of any shape.
        knots: Strictly increasing, ``[k]``, at least one. A single knot is a constant function.
        values: The function at the knots, ``[k]``.
        outside: Answer beyond the first and last knot: their values, or NaN. NaN always gives NaN.

    Example:
        >>> knots, values = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([5.0, 6.0, 10.0])
        >>> interp(torch.tensor([-1.0, 0.5, 2.0, 3.0]), knots, values).tolist()
        [5.0, 5.5, 8.0, 10.0]
    """
    if len(knots) == 1:
        return values.expand(x.shape).clone()
    inside = x.clamp(knots[0], knots[-1])
    above = torch.searchsorted(knots, inside.contiguous()).clamp(1, len(knots) - 1)
    left, right = knots[above - 1], knots[above]
    low, high = values[above - 1], values[above]
    result = low + (high - low) / (right - left) * (inside - left)
    result = torch.where(inside == right, high, result)
    return result if outside == "clip" else torch.where(inside == x, result, torch.nan)


class Isotonic(nn.Module):
    """:func:`interp` of a table of one column, with trainable values.

    Args:
        knots: Strictly increasing, ``[k]``.
        values: ``[k]``.
        outside: See :func:`interp`.
        rounds: True rounds the input to float32 first, as a source that was fitted on float32 does.
    """

    knots: Tensor

    def __init__(
        self, knots: npt.ArrayLike, values: npt.ArrayLike, *, outside: Outside = "clip", rounds: bool = False
    ) -> None:
        super().__init__()
        self.register_buffer("knots", torch.from_numpy(np.array(knots, np.float64)))
        self.values = parameter(values)
        self.outside: Outside = outside
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        """Interpolate ``x``, ``[rows, 1]``."""
        given = x.to(torch.float32).to(x.dtype) if self.rounds else x
        return interp(given, self.knots, self.values, outside=self.outside)


LOG_OFFSET = 1e-12  # what scikit-learn adds to probabilities before it takes their logarithm
OVERSHOOT = 1e-5  # probabilities that exceed 1 by no more than this are cut to 1


class PlattSigmoid(nn.Module):
    """``1 / (1 + exp(a x + b))`` (Platt, "Probabilistic outputs for support vector machines", 1999)."""

    def __init__(self, slope: float, intercept: float) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope, dtype=torch.float64))
        self.intercept = nn.Parameter(torch.tensor(intercept, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the calibrated probability of each score in ``x``."""
        return torch.sigmoid(-(self.slope * x + self.intercept))


class PerClass(nn.Module):
    """A calibrator for each class, then normalisation; for two classes one, and its complement.

    Args:
        layout: Layout of the member's table.
        calibrators: ``[rows, 1]`` to ``[rows, 1]``, one for each column of scores.
        class_indices: Class of each column, as an index in all classes.
        num_classes: All classes.
    """

    def __init__(
        self, layout: Layout, calibrators: Sequence[nn.Module], *, class_indices: Sequence[int], num_classes: int
    ) -> None:
        super().__init__()
        self.layout = layout
        self.calibrators = nn.ModuleList(calibrators)
        self.places = list(class_indices)  # saved files hold this name
        self.num_classes = num_classes

    def forward(self, table: Tensor) -> Tensor:
        """Return ``[rows, num_classes]``."""
        scores = _responses(self.layout, table)
        columns = [torch.zeros_like(scores[:, :1])] * self.num_classes
        for number, (index, calibrator) in enumerate(zip(self.places, self.calibrators, strict=True)):
            columns[index] = calibrator(scores[:, number : number + 1])
        if self.num_classes == 2:
            return torch.cat([1 - columns[1], columns[1]], dim=1)
        shares = torch.cat(columns, dim=1)
        total = shares.sum(dim=1, keepdim=True)
        is_zero = total == 0
        return torch.where(is_zero, 1 / self.num_classes, shares / torch.where(is_zero, 1, total))


class Temperature(nn.Module):
    """Softmax of logits times an inverse temperature (Guo et al., ICML 2017).

    Args:
        layout: Layout of the member's table.
        inverse_temperature: The factor.
    """

    def __init__(self, layout: Layout, inverse_temperature: float) -> None:
        super().__init__()
        self.layout = layout
        self.inverse_temperature = nn.Parameter(torch.tensor(inverse_temperature, dtype=torch.float64))

    def forward(self, table: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        if "predict_proba" in self.layout.methods:
            logits = (self.layout.take(table, "predict_proba") + LOG_OFFSET).log()
        else:
            logits = self.layout.take(table, "decision_function")
            if logits.shape[1] == 1:
                logits = torch.cat([-logits, logits], dim=1)
        return (self.inverse_temperature * logits).softmax(dim=1)


def _responses(layout: Layout, table: Tensor) -> Tensor:
    """Return decision values or probabilities; of two classes the second's alone."""
    if "decision_function" in layout.methods:
        return layout.take(table, "decision_function")
    shares = layout.take(table, "predict_proba")
    return shares[:, 1:] if layout.num_classes == 2 else shares


class Calibrated(PredictorModule):
    """The mean of calibrated members' probabilities.

    Args:
        calibrations: A member's table to ``[rows, classes]``, one for each member.
    """

    task: Task = "classification"

    def __init__(self, calibrations: Sequence[nn.Module], *, classes: Sequence[object], answers: Sequence[str]) -> None:
        super().__init__(classes=classes, answers=answers)
        self.calibrations = nn.ModuleList(calibrations)

    def forward(self, *tables: Tensor) -> Tensor:
        """Return probabilities ``[rows, classes]``."""
        total = torch.zeros_like(tables[0][:, :1])
        for calibration, table in zip(self.calibrations, tables, strict=True):
            shares = calibration(table)
            total = total + torch.where((shares > 1) & (shares <= 1 + OVERSHOOT), 1, shares)
        return total / len(tables)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return ``scores``, which are probabilities."""
        return scores

    def prediction(self, scores: Tensor) -> Tensor:
        """Return class indices, ``[rows]``."""
        return scores.argmax(dim=1)
