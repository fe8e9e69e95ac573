"""Loops over strided windows, made as few and as long as the strides allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlsys_nimble.backends.cpu.library import View


def merged(views: Sequence[View]) -> list[View]:
    """Views of one shape with their dimensions in the order of the last one's strides, and merged where all allow it.

    Returns:
        The same elements in the same pairing, at least one dimension; dimensions of size 1 are gone.
    """
    out = views[-1]
    order = sorted(range(len(out.shape)), key=lambda dim: -out.strides[dim])
    return folded([view.permuted(order) for view in views])


def folded(views: Sequence[View]) -> list[View]:
    """Views of one shape with neighbouring dimensions merged where all allow it; their order stays."""
    out = views[-1]
    kept = [dim for dim in range(len(out.shape)) if out.shape[dim] != 1]
    shape: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for dim in kept:
        size = out.shape[dim]
        if shape and all(mine[-1] == view.strides[dim] * size for mine, view in zip(strides, views, strict=True)):
            shape[-1] *= size
            for mine, view in zip(strides, views, strict=True):
                mine[-1] = view.strides[dim]
        else:
            shape.append(size)
            for mine, view in zip(strides, views, strict=True):
                mine.append(view.strides[dim])
    if not shape:
        return [view.reshaped((1,), (1,)) for view in views]
    return [view.reshaped(shape, mine) for view, mine in zip(views, strides, strict=True)]


def broadcast(view: View, shape: Sequence[int]) -> View:
    """``view`` repeated to ``shape``, by torch's rules."""
    missing = len(shape) - len(view.shape)
    strides = [
        0 if size == 1 and wanted != 1 else stride
        for size, stride, wanted in zip(view.shape, view.strides, shape[missing:], strict=True)
    ]
    return view.reshaped(shape, [*[0] * missing, *strides])


def with_transposed_last(x: View, out: View) -> tuple[View, View]:
    """``x`` and ``out``, merged, with x's closest dimension just before the last: tiles can be transposed."""
    rank = len(out.shape)
    if x.strides[-1] == 1 or rank < 2 or 1 not in x.strides:
        return x, out
    closest = x.strides.index(1)
    dims = [*(dim for dim in range(rank - 1) if dim != closest), closest, rank - 1]
    return x.permuted(dims), out.permuted(dims)
