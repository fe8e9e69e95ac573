"""Choose few cases of a large grid, so that pairs of values are covered; for `pytest --quick` and `--pairs`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any


def representatives(cases: Sequence[Mapping[str, Hashable]], most: int) -> list[int]:
    """Return the indices of at most ``most`` cases that cover as many pairs of values as few cases can.

    Args:
        cases: A value by parameter for each case; all have the same parameters.
        most: How many to choose; where there are no more cases, all are.

    Each choice is the case with the most pairs that none before it has (greedy cover; the first of equals). Of two
    parameters each case is a pair of its own: values count, too. Cases of a single parameter are taken at equal
    distances, the first and the last among them.

    Example:
        >>> grid = [{"a": a, "b": b, "c": c} for a in "xy" for b in "xy" for c in "xy"]
        >>> representatives(grid, 4)
        [0, 3, 5, 6]
        >>> representatives([{"a": a, "b": b} for a in "xyz" for b in "xyz"], 3)
        [0, 4, 8]
    """
    if len(cases) <= most:
        return list(range(len(cases)))
    if len(cases[0]) < 2:
        return sorted({round(index * (len(cases) - 1) / max(most - 1, 1)) for index in range(most)})
    values = cases if len(cases[0]) == 2 else [{}] * len(cases)
    pairs = [{*own.items(), *combinations(sorted(case.items()), 2)} for own, case in zip(values, cases, strict=True)]
    covered: set[object] = set()
    chosen: list[int] = []
    while len(chosen) < most:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] - covered))
        if not pairs[best] - covered:
            break
        chosen.append(best)
        covered |= pairs[best]
    return sorted(chosen)


def values_by_axis(case: Any) -> dict[str, Hashable]:
    """Return a value by axis of the grid for a collected test; the arguments of one ``parametrize`` are one axis.

    ``callspec.indices`` are not these: pytest numbers arguments that are no fixtures by case.
    """
    params, axes = case.callspec.params, []
    for marker in case.iter_markers("parametrize"):
        names = marker.args[0] if marker.args else marker.kwargs["argnames"]
        axes.append([each.strip() for each in names.split(",")] if isinstance(names, str) else list(names))
    named = {name for axis in axes for name in axis}
    axes += [[name] for name in params if name not in named]  # of fixtures
    return {",".join(axis): tuple(_hashable(params[name]) for name in axis if name in params) for axis in axes}


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
