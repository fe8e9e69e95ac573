"""Views in the forms that kernels take: images of three dimensions, and loops merged as far as strides allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlsys_nimble.backends.cpu.library import SPACE, View
from mlsys_nimble.ir import operators


def in_space(values: Sequence[int], filler: int) -> tuple[int, ...]:
    """Return a value for each of three dimensions of space, with fillers for leading ones that are missing."""
    return (*(filler,) * (SPACE - len(values)), *values)


def image(view: View | None) -> View | None:
    """View [N, C, *space] as [N, C, D, H, W]."""
    if view is None:
        return None
    missing = (0,) * (SPACE + 2 - len(view.shape))
    return view.reshaped(
        (*view.shape[:2], *(1 for _ in missing), *view.shape[2:]), (*view.strides[:2], *missing, *view.strides[2:])
    )


def window(kind: operators.Convolution | operators.Pool, kernel: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a kernel's arguments that say where a window of size ``kernel`` lies."""
    return {
        "kernel": in_space(kernel, 1),
        "stride": in_space(kind.stride, 1),
        "before": in_space([before for before, _ in kind.padding], 0),
        "dilation": in_space(kind.dilation, 1),
    }


def merged(views: Sequence[View]) -> list[View]:
    """Order the dimensions of views of one shape by the last view's strides, and merge neighbours where all allow it.

    Returns:
        Views that pair the same elements, of at least one dimension; dimensions of size 1 are dropped.
    """
    out = views[-1]
    order = sorted(range(len(out.shape)), key=lambda dim: -out.strides[dim])
    return folded([view.permuted(order) for view in views])


def folded(views: Sequence[View]) -> list[View]:
    """Merge neighbouring dimensions of views of one shape where all allow it, in the given order."""
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
    """Broadcast ``view`` to ``shape`` by torch's rules."""
    missing = len(shape) - len(view.shape)
    strides = [
        0 if size == 1 and wanted != 1 else stride
        for size, stride, wanted in zip(view.shape, view.strides, shape[missing:], strict=True)
    ]
    return view.reshaped(shape, [*[0] * missing, *strides])


def with_transposed_last(x: View, out: View) -> tuple[View, View]:
    """Move the dimension in which ``x`` is contiguous just before the last, so that tiles can be transposed."""
    rank = len(out.shape)
    if x.strides[-1] == 1 or rank < 2 or 1 not in x.strides:
        return x, out
    closest = x.strides.index(1)
    dims = [*(dim for dim in range(rank - 1) if dim != closest), closest, rank - 1]
    return x.permuted(dims), out.permuted(dims)
