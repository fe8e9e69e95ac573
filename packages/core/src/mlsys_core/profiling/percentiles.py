"""Distributions of measured values, as every benchmark, summary and load generator reports them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of ``count`` values, in their unit. Of no values, ``total`` is 0 and all else NaN."""

    count: int
    total: float
    mean: float
    std: float  # of the population (divides by count)
    min: float
    p50: float
    p90: float
    p99: float
    max: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; None in place of NaN, which JSON lacks."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }


def summarise(values: Sequence[float] | NDArray[np.floating[Any]]) -> Distribution:
    """Return count, mean, spread and percentiles of ``values``.

    Percentiles are NumPy's method ``linear`` (Hyndman and Fan's type 7): the q-th lies at position q (n - 1) of the
    sorted values, interpolated between its neighbours.

    Args:
        values: One-dimensional, finite, any unit.

    Raises:
        InvalidInputError: ``values`` has another number of dimensions, or holds NaN or infinity.

    Example:
        >>> summarise([1.0, 2.0, 3.0, 4.0]).p50
        2.5
    """
    import numpy as np  # here: the recorder's importers need no NumPy

    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise InvalidInputError(f"summarise takes a one-dimensional sequence of numbers, got shape {array.shape}")
    if array.size == 0:
        return Distribution(0, 0.0, *[math.nan] * 7)
    if not np.isfinite(array).all():
        bad = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InvalidInputError(f"values[{bad}] is {array[bad]}: only finite values have percentiles; leave it out")
    p50, p90, p99 = np.percentile(array, [50, 90, 99], method="linear").tolist()
    return Distribution(
        count=int(array.size),
        total=float(array.sum()),
        mean=float(array.mean()),
        std=float(array.std()),
        min=float(array.min()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=float(array.max()),
    )
