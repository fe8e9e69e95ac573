"""Python's garbage collector beside work that must not halt."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_out_of_collections() -> Iterator[None]:
    """What is loaded by now stays for the time of the block: full collections pass it over.

    To look through a model's objects and all that torch has loaded takes some 75 ms, which would halt all requests.

    Example:
        >>> with kept_out_of_collections():
        ...     gc.get_freeze_count() > 0
        True
        >>> gc.get_freeze_count()
        0
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
