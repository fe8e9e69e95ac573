"""Python's garbage collector beside work that must not halt, and beside imports, which leave it nothing to collect."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()
# New containers until the youngest are looked at, and such looks until older ones are. Importing torch and a web server
# makes half a million objects that stay: a sixth of its time went into 500 looks at them.
_SELDOM = 50_000, 20, 100
# Requests in flight are young containers, some 150 each, and all live: 256 clients made a look of every thousandth of
# them a sixth of a server's time. No request leaves a cycle behind, so there is little to find.
_SERVING = 50_000, 10, 10


def collect_seldom() -> None:
    """Have garbage be looked for seldom from now on; for the owner of a process that starts."""
    gc.set_threshold(*_SELDOM)


def collect_as_usual() -> None:
    """Have garbage be looked for as Python does by itself: often, and each time for a moment only.

    What the start has made is exempt: all else a first look would go through it, in each forked process anew.

    Example:
        >>> collect_seldom()
        >>> collect_as_usual()
        >>> gc.get_threshold() == _USUAL, gc.get_freeze_count() > 0
        (True, True)
        >>> gc.unfreeze()
    """
    gc.freeze()
    gc.set_threshold(*_USUAL)


@contextmanager
def collecting_beside_requests() -> Iterator[None]:
    """Keep collections short and seldom within the block, in which a server's process answers requests.

    All that the start has made is exempt; at the end it is not any more, and garbage is looked for as before.

    Example:
        >>> with collecting_beside_requests():
        ...     gc.get_threshold() == _SERVING, gc.get_freeze_count() > 0
        (True, True)
        >>> gc.get_freeze_count()
        0
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_SERVING)
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Have garbage be looked for seldom within the block, which imports much; leave alone who chose other settings.

    Example:
        >>> before = gc.get_threshold()
        >>> with collecting_seldom():
        ...     import json
        >>> gc.get_threshold() == before
        True
    """
    before = gc.get_threshold()
    if before == _USUAL:
        gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        if before == _USUAL and gc.get_threshold() == _SELDOM:
            gc.set_threshold(*before)


@contextmanager
def kept_out_of_collections(*, collects: bool = True) -> Iterator[None]:
    """Exempt all objects loaded so far from garbage collection within the block.

    A full collection over a model's objects and torch's modules takes about 75 ms and would halt all requests.

    Args:
        collects: Look for garbage first; a process that ends soon need not.

    Example:
        >>> with kept_out_of_collections():
        ...     gc.get_freeze_count() > 0
        True
        >>> gc.get_freeze_count()
        0
    """
    if collects:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
