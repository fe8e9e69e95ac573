"""Cuts of a sequence of operators, by even time or where the preferred batch size changes. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mlsys_core.errors import InvalidInputError


def even_cuts(seconds: Sequence[float], allowed: Sequence[int], num_stages: int) -> list[int]:
    """Return the cuts that make the longest stage as short as possible, in order.

    Args:
        seconds: time of each operator.
        allowed: positions where a cut may be: ``k`` cuts before operator ``k``; rising.
        num_stages: stages wanted.

    Returns:
        ``num_stages - 1`` of the allowed positions.

    Raises:
        InvalidInputError: there are not enough positions.

    Example:
        >>> even_cuts([1, 1, 1, 3], [1, 2, 3], 2)
        [3]
    """
    if not 1 <= num_stages <= len(allowed) + 1:
        raise InvalidInputError(
            f"{num_stages} stages are asked for, but this model can be cut at {len(allowed)} points: give 1 to "
            f"{len(allowed) + 1}"
        )
    total = [0.0, *accumulate(seconds)]
    ends = [*allowed, len(seconds)]
    best = [[(total[end], -1) for end in ends]]  # [cuts so far][end] -> longest stage, position of the cut before
    for cuts in range(1, num_stages):
        best.append(
            [
                min(
                    (max(best[cuts - 1][before][0], total[end] - total[ends[before]]), before)
                    for before in range(cuts - 1, index)
                )
                if index >= cuts
                else (float("inf"), -1)
                for index, end in enumerate(ends)
            ]
        )
    chosen: list[int] = []
    position = len(ends) - 1
    for cuts in range(num_stages - 1, 0, -1):
        position = best[cuts][position][1]
        chosen.append(ends[position])
    return chosen[::-1]


def diversity_cuts(preferred: Sequence[int], allowed: Sequence[int], num_stages: int) -> list[int]:
    """Return the cuts where the preferred batch size changes most between neighbours.

    Args:
        preferred: preferred batch size of each operator.
        allowed: See :func:`even_cuts`.
        num_stages: stages wanted; fewer come out where there are fewer changes.

    Example:
        >>> diversity_cuts([8, 8, 8, 1, 1, 2], [1, 2, 3, 4, 5], 2)
        [3]
    """
    ratio = {cut: _ratio(preferred[cut - 1], preferred[cut]) for cut in allowed}
    changes = sorted((cut for cut in allowed if ratio[cut] > 1), key=lambda cut: (-ratio[cut], cut))
    return sorted(changes[: num_stages - 1])


def _ratio(left: int, right: int) -> float:
    return max(left, right) / min(left, right)
