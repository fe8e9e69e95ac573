"""Checks that the architectures share."""

from __future__ import annotations

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_batchmaker.models.model import Payload

Ints = NDArray[np.int64]


def sequence(request: Payload, name: str) -> NDArray[np.generic]:
    """Return the tensor ``name``, at least one step long.

    Raises:
        InvalidInputError: it is missing, empty, or a single number.
    """
    if name not in request:
        raise InvalidInputError(f"the request has no tensor {name!r}: it has {', '.join(request) or 'none'}")
    values = np.asarray(request[name])
    if values.ndim == 0 or len(values) == 0:
        raise InvalidInputError(f"{name}: at least one step is needed, got shape {list(values.shape)}")
    return values


def number(request: Payload, name: str, default: int, *, low: int, high: int) -> int:
    """Return the whole number ``name``, or ``default``.

    Raises:
        InvalidInputError: it is no whole number from ``low`` to ``high``.
    """
    if name not in request:
        return default
    values = np.asarray(request[name])
    if values.size != 1 or values.dtype.kind not in "iu" or not low <= int(values.reshape(-1)[0]) <= high:
        raise InvalidInputError(f"{name}: one whole number from {low} to {high} is needed, got {values.tolist()!r}")
    return int(values.reshape(-1)[0])
