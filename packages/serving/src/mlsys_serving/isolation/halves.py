"""Run a batch so that a request at fault fails alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from mlsys_core.errors import InvalidInputError, ServingError

Part = TypeVar("Part")
# What torch and ONNX Runtime say, in words of their own, of values outside a table or of a division by 0.
_OF_VALUES = re.compile(
    r"index out of range in self|out of bounds for dimension|index out of bounds|Class values must be|"
    r"Target -?\d+ is out of bounds|^ZeroDivisionError$|element out of data bounds|(division|modulo) by zero"
)


class NotFiniteError(ServingError):
    """The model's answer to this request holds NaN or infinity, where that cannot be told: 400, as JSON's in OIP.

    Example:
        >>> str(NotFiniteError())
        "the model's answer to this request is not finite (NaN or infinity); check its input"
    """

    http_status = 400
    error_code = "not_finite"

    def __init__(self, what: str = "the model's answer to this request", then: str = "check its input") -> None:
        super().__init__(f"{what} is not finite (NaN or infinity); {then}")


def run_in_halves(run: Callable[[range], Part], size: int) -> tuple[list[tuple[range, Part]], dict[int, Exception]]:
    """Run positions 0 to ``size``; after an exception run each half, until requests at fault are alone.

    One request at fault among ``size`` costs at most ``2 * log2(size) + 1`` runs; all of them, ``2 * size - 1``.

    Args:
        run: Runs the requests at some positions, which follow one another; may raise.
        size: Number of requests, at least 1.

    Returns:
        The output of each successful run, with its positions, in their order; and the exception of each request that
        failed alone.

    Example:
        >>> def run(positions):
        ...     if 2 in positions:
        ...         raise ValueError("2 is poisoned")
        ...     return [position * 10 for position in positions]
        >>> run_in_halves(run, 4)
        ([(range(0, 2), [0, 10]), (range(3, 4), [30])], {2: ValueError('2 is poisoned')})
    """
    parts: list[tuple[range, Part]] = []
    failed: dict[int, Exception] = {}
    waiting = [range(size)]
    while waiting:
        positions = waiting.pop()
        try:
            parts.append((positions, run(positions)))
        except Exception as error:  # noqa: BLE001 - a request boundary: whose fault it is shows when they run apart
            if len(positions) == 1:
                failed[positions[0]] = blamed(error)
            else:
                middle = (positions.start + positions.stop) // 2
                waiting += [range(middle, positions.stop), range(positions.start, middle)]
    return parts, failed


def blamed(error: Exception) -> Exception:
    """Return the error of a request that failed alone: a refusal, with the reason, where its own values are at fault.

    Example:
        >>> blamed(IndexError("index out of range in self"))
        InvalidInputError('the model does not take these values: index out of range in self')
        >>> blamed(IndexError("list index out of range"))
        IndexError('list index out of range')
    """
    text = str(error).strip().partition("\n")[0]
    if not isinstance(error, IndexError | RuntimeError | AssertionError) or not _OF_VALUES.search(text):
        return error
    refusal = InvalidInputError(f"the model does not take these values: {text}")
    refusal.__cause__ = error
    return refusal


def is_finite(answer: Any) -> bool:
    """Return whether all floating-point numbers of an answer are finite; tensors of torch count as arrays."""
    values = answer.values() if isinstance(answer, dict) else answer if isinstance(answer, tuple) else (answer,)
    return all(map(_all_finite, values))


def _all_finite(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind not in "fc" or bool(np.isfinite(value).all())
    isfinite = getattr(value, "isfinite", None)  # a tensor; torch is not imported for it
    return isfinite is None or bool(isfinite().all())
