"""Builds of kernels for other machines, for the kernels' own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlsys_core.config import settings
from mlsys_core.native import loader
from mlsys_core.native.levels import builds


def builds_to_test() -> dict[str, tuple[str, ...]]:
    """Return the builds that kernels' tests run in this process: all levels, or with a sanitizer the chosen one."""
    chosen = settings()
    found = builds(chosen.kernel_level)
    return {chosen.kernel_level: ()} if chosen.sanitizer else found


@contextmanager
def compiled_with(flags: tuple[str, ...], *cached: Callable[..., Any]) -> Iterator[None]:
    """Compile kernels with further flags while this is open.

    Args:
        flags: One build of :func:`builds_to_test`.
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
