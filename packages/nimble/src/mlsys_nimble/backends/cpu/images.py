"""Images of one to three dimensions of space in the form that kernels take."""

from __future__ import annotations

from collections.abc import Sequence

from mlsys_nimble.backends.cpu.library import SPACE, View


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
