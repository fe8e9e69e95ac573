"""Rows held out of training, to choose the best epoch by."""

from __future__ import annotations

from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from sklearn.model_selection import train_test_split
from sklearn.utils import _safe_indexing

FEWEST_ROWS = 50  # of fewer, none are held out

HeldOut = tuple[Any, Any, Any]  # rows, targets, weights


def hold_out(
    X: Any,  # noqa: N803
    y: Any,
    weight: Any,
    *,
    fraction: float,
    seed: int,
    is_classifier: bool,
) -> tuple[Any, Any, Any, HeldOut | None]:
    """Split into training rows, targets and weights, then those held out.

    The split is stratified by class where each has two rows.

    Raises:
        InvalidInputError: the fraction is below 0, or 1 or more.
    """
    if not 0 <= fraction < 1:
        raise InvalidInputError(f"validation_fraction is {fraction}; it must be from 0 to below 1")
    target = np.asarray(y)
    if not fraction or len(target) < FEWEST_ROWS:
        return X, y, weight, None
    labels = None
    if is_classifier:
        _, counts = np.unique(target, return_counts=True)
        num_held_out = int(len(target) * fraction)
        labels = target if counts.min() >= 2 and num_held_out >= len(counts) else None
    kept, held = train_test_split(np.arange(len(target)), test_size=fraction, random_state=seed, stratify=labels)
    if is_classifier and len(np.unique(target[kept])) < len(np.unique(target)):
        return X, y, weight, None  # a class would be unknown to the pipeline
    parts = [(_safe_indexing(X, rows), target[rows]) for rows in (kept, held)]
    weights = [None if weight is None else np.asarray(weight)[rows] for rows in (kept, held)]
    return *parts[0], weights[0], (*parts[1], weights[1])
