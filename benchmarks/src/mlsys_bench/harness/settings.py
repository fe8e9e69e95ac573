"""Search for the settings that are best for a case, on a piece of its own work, before the race."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def best_of(candidates: Iterable[T], score: Callable[[T], float]) -> tuple[T | None, list[tuple[T, float]]]:
    """Return the candidate with the largest score, the first of equals, and all scores; None if none is above 0.

    Example:
        >>> best_of([32, 64, 96], lambda size: min(size, 64) / 32)
        (64, [(32, 1.0), (64, 2.0), (96, 2.0)])
    """
    scores = [(candidate, score(candidate)) for candidate in candidates]
    best = max(scores, key=lambda pair: pair[1], default=None)
    return (best[0] if best is not None and best[1] > 0 else None), scores
