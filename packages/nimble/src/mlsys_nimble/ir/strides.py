"""Arithmetic of strides, in elements: the pure part of a tensor library's views."""

from __future__ import annotations

from math import prod
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]
Strides: TypeAlias = tuple[int, ...]
Order: TypeAlias = tuple[int, ...]  # dimensions from the outermost in memory to the innermost


def row_major(rank: int) -> Order:
    """Return the order with the last dimension innermost."""
    return tuple(range(rank))


def channels_last(rank: int) -> Order:
    """Return the order with dimension 1 innermost: N, *space, C."""
    return (0, *range(2, rank), 1) if rank > 2 else row_major(rank)


def dense(shape: Shape, order: Order) -> Strides:
    """Return strides without gaps for dimensions in this order.

    Example:
        >>> dense((1, 8, 4, 4), channels_last(4))
        (128, 1, 32, 8)
    """
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def order_of(shape: Shape, strides: Strides) -> Order:
    """Return the order that the strides imply; dimensions of size 1 go where they are in row-major order."""
    order = [dim for dim in range(len(shape)) if shape[dim] != 1]
    order.sort(key=lambda dim: -strides[dim])  # stable: expanded dimensions keep their order
    for dim in range(len(shape)):
        if shape[dim] == 1:
            order.insert(dim, dim)
    return tuple(order)


def reshaped(shape: Shape, strides: Strides, wanted: Shape) -> Strides | None:
    """Return strides that view the same elements, in row-major order, as shape ``wanted``; None if none can.

    Example:
        >>> reshaped((2, 3, 4), (12, 4, 1), (6, 4)), reshaped((2, 3), (1, 2), (6,))
        ((4, 1), None)
    """
    if any(size == 0 for size in shape):
        return dense(wanted, row_major(len(wanted)))
    blocks: list[tuple[int, int]] = []  # (elements, stride of the last), neighbours merged where one runs into the next
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == size * stride:
            blocks[-1] = (blocks[-1][0] * size, stride)
        else:
            blocks.append((size, stride))
    found = [1] * len(wanted)
    left, step = 1, 1  # elements of the current block not yet covered, and their stride
    for dim in reversed(range(len(wanted))):
        if wanted[dim] == 1:
            continue
        if left == 1:
            left, step = blocks.pop()
        if left % wanted[dim]:
            return None
        found[dim] = step
        left //= wanted[dim]
        step *= wanted[dim]
    return tuple(found)


def is_inner(dim: int, shape: Shape, strides: Strides) -> bool:
    """Return whether the elements of ``dim`` lie side by side."""
    return shape[dim] == 1 or strides[dim] == 1


def has_even_rows(shape: Shape, strides: Strides) -> bool:
    """Return whether the last dimension is contiguous and the rows before it are equally far apart."""
    rows = reshaped(shape[:-1], strides[:-1], (prod(shape[:-1]),))
    return is_inner(len(shape) - 1, shape, strides) and rows is not None
