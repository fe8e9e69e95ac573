"""Kernels of other machines, for the kernels' own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlsys_core.native import loader


@contextmanager
def compiled_with(flags: tuple[str, ...], *cached: Callable[..., Any]) -> Iterator[None]:
    """Compile kernels with further flags while this is open.

    Args:
        flags: One build of :func:`~mlsys_core.native.levels.builds`.
        cached: Functions with a ``functools`` cache that keep what was loaded; they forget it now, and at the end.

    Example:
        >>> with compiled_with(("-march=x86-64",)):
        ...     pass
    """
    before = loader.further_flags
    loader.further_flags = flags
    try:
        for function in cached:
            function.cache_clear()  # type: ignore[attr-defined]
        yield
    finally:
        loader.further_flags = before
        for function in cached:
            function.cache_clear()  # type: ignore[attr-defined]
