"""Images of one to three dimensions of space in the form that kernels take."""

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
