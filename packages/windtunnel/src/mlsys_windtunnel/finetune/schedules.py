"""Schedules of the learning rate over training: pure functions of the step."""

from __future__ import annotations

import math

from mlsys_windtunnel.finetune.options import Schedule

WARM_UP = 0.1  # share of the steps of a one-cycle schedule in which the rate rises
LOWEST_START, LOWEST_END = 1 / 25, 1e-4  # of the highest rate


def rate(schedule: Schedule, step: int, num_steps: int) -> float:
    """Return the factor of the highest learning rate in step ``step`` of ``num_steps``, above 0 and at most 1.

    ``onecycle`` rises and falls along cosines (Smith and Topin, 2018), ``cosine`` and ``linear`` fall from 1, and
    ``constant`` stays there.
    """
    progress = step / max(1, num_steps - 1)
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1 - (1 - LOWEST_END) * progress
    if schedule == "cosine":
        return _cosine(1.0, LOWEST_END, progress)
    if progress < WARM_UP:
        return _cosine(LOWEST_START, 1.0, progress / WARM_UP)
    return _cosine(1.0, LOWEST_END, (progress - WARM_UP) / (1 - WARM_UP))


def sharpness(final: float, step: int, num_steps: int) -> float:
    """Return the factor of inverse temperatures: from 1 to ``final``, growing by the same factor each step."""
    return float(final ** (step / max(1, num_steps - 1)))


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
