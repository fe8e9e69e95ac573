"""Split of an iteration's time between prefill and decode. Pure.

One batch runs both, so the split is a model: an iteration of decodes alone takes ``fixed + n * each``, which is learnt
from such iterations; what a mixed one takes beyond that is its prefills' doing.
"""

from __future__ import annotations

from collections.abc import Sequence

_DECAY = 0.98  # weight of the past at each new iteration: some fifty count


class PrefillSplit:
    """Estimate of decode-only iterations, by least squares over recent ones.

    Example:
        >>> split = PrefillSplit()
        >>> for n in (1, 2, 4, 8):
        ...     _ = split.divide(10.0 + n, num_decode_rows=n, num_prefill_rows=0)
        >>> {cause: round(part) for cause, part in split.divide(40.0, num_decode_rows=2, num_prefill_rows=64).items()}
        {'decode': 12, 'prefill': 28}
    """

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def divide(self, ms: float, *, num_decode_rows: int, num_prefill_rows: int) -> dict[str, float]:
        """Return the milliseconds of an iteration by cause: ``decode``, ``prefill``. Learns from it."""
        if not num_prefill_rows:
            self._learn(ms, num_decode_rows)
            return {"decode": ms}
        if not num_decode_rows:
            return {"prefill": ms}
        alone_ms = self.decodes_ms(num_decode_rows)
        if alone_ms is None:
            alone_ms = ms * num_decode_rows / (num_decode_rows + num_prefill_rows)
        decode_ms = min(alone_ms, ms)
        return {"decode": decode_ms, "prefill": ms - decode_ms}

    def decodes_ms(self, num_rows: int) -> float | None:
        """Return the estimated time of an iteration of ``num_rows`` decodes alone; None: none was seen."""
        if not self._weight:
            return None
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        covariance = self._nt / self._weight - mean_n * mean_t
        each = max(0.0, covariance / variance) if variance > 1e-9 else 0.0
        return max(0.0, mean_t + each * (num_rows - mean_n))

    def _learn(self, ms: float, n: int) -> None:
        self._weight = _DECAY * self._weight + 1
        self._n = _DECAY * self._n + n
        self._nn = _DECAY * self._nn + n * n
        self._t = _DECAY * self._t + ms
        self._nt = _DECAY * self._nt + n * ms


def fit_costs(samples: Sequence[tuple[float, int, int]]) -> tuple[float, float, float]:
    """Return (fixed, of a decode row, of a prefill row) in milliseconds, each 0 or more: least squares.

    Args:
        samples: (milliseconds, decode rows, prefill rows) of iterations, at least one.

    Example:
        >>> [round(cost, 3) for cost in fit_costs([(11, 1, 0), (12, 2, 0), (26, 0, 32), (27, 1, 32)])]
        [10.0, 1.0, 0.5]
    """
    import numpy as np

    times = np.array([ms for ms, _, _ in samples])
    inputs = np.array([(1.0, decodes, prefills) for _, decodes, prefills in samples])
    kept = [0, 1, 2]
    while kept:  # a negative cost is noise: leave its input out
        found = np.linalg.lstsq(inputs[:, kept], times, rcond=None)[0]
        if (found >= 0).all():
            costs = dict(zip(kept, found.tolist(), strict=True))
            return costs.get(0, 0.0), costs.get(1, 0.0), costs.get(2, 0.0)
        kept.pop(int(found.argmin()))
    return float(times.mean()), 0.0, 0.0
