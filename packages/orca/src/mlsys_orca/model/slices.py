"""The fixed shape of sums over input features that may lie on several ranks (ADR 22); pure.

Attention's output and the MLP's second product are computed in ``S`` slices of their input features, also by one
process, and the slices are added in one binary tree. A rank adds the subtree of the slices that it owns, so any number
of ranks that divides ``S`` gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mlsys_orca.model.config import ModelConfig

MAX_SLICES = 4  # of up to four ranks
MAX_RANKS = 8
_GROUPS = (32, 16, 2)  # features that stay together where they divide the whole: groups of a quantised weight, pairs

T = TypeVar("T")


def num_slices(config: ModelConfig, num_ranks: int = 1) -> int:
    """Return the slices of the sums of a model: the largest of 4, 3, 2, 1 that divides all that ranks share.

    It follows from the model alone, not from the form of its weights or the number of ranks: 1, where something spans
    heads. Eight ranks alone have eight, and bits of their own: so many would slow one process.
    """
    if num_ranks == MAX_RANKS:
        return MAX_RANKS
    return max(number for number in range(1, MAX_SLICES + 1) if _divides(config, number))


def rank_degrees(config: ModelConfig) -> list[int]:
    """Return the numbers of ranks that may divide a model."""
    slices = num_slices(config)
    degrees = [degree for degree in range(1, slices + 1) if slices % degree == 0]
    return degrees + [MAX_RANKS] * _divides(config, MAX_RANKS)


def _divides(config: ModelConfig, number: int) -> bool:
    if config.spans_heads:
        return number == 1
    if config.num_heads % number or config.num_kv_heads % number:
        return False
    return all(
        features % (number * _together(features)) == 0
        for features in (config.num_heads * config.head_dim, config.intermediate_size)
    )


def _together(features: int) -> int:
    """Return how many neighbouring features a slice never parts."""
    return next((size for size in _GROUPS if features % size == 0), 1)


def add_in_tree(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Return the sum of ``parts`` in the order that all sums over slices or ranks have.

    Neighbours are added first, then neighbouring sums: of four (0 + 1) + (2 + 3), of three (0 + 1) + 2.

    Example:
        >>> add_in_tree("abcd", lambda left, right: f"({left}+{right})")
        '((a+b)+(c+d))'
        >>> add_in_tree("abc", lambda left, right: f"({left}+{right})")
        '((a+b)+c)'
    """
    while len(parts) > 1:
        pairs = [add(parts[i], parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[len(parts) - len(parts) % 2 :]]
    return parts[0]
