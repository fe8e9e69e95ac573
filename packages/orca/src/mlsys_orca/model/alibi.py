"""Slopes of ALiBi's biases by distance (Press et al., 2022): numbers only.

Between the families that have them and :class:`~mlsys_orca.model.attention.AttentionOptions`.
"""

from __future__ import annotations

from math import ceil, floor, log2


def halving_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slopes of each head as the paper and BLOOM have them.

    Heads beyond the largest power of two take every second slope of twice as many.

    Example:
        >>> halving_slopes(3)
        (0.0625, 0.00390625, 0.25)
    """
    most = 2 ** floor(log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / most) for head in range(most)]
    return tuple(slopes + [2 ** (-4 * (head + 1) / most) for head in range(0, 2 * (num_heads - most), 2)])


def mosaic_slopes(num_heads: int, *, most: float = 8) -> tuple[float, ...]:
    """Return the slopes of each head as MPT has them: of the next power of two, the second, the fourth, ... first.

    Args:
        num_heads: Query heads.
        most: Exponent of the last head's slope.

    Example:
        >>> mosaic_slopes(3)
        (0.0625, 0.00390625, 0.25)
    """
    total = 2 ** ceil(log2(num_heads))
    slopes = [2 ** (-most * (head + 1) / total) for head in range(total)]
    return tuple(slopes if total == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])
