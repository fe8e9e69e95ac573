"""The compiled program: loading, and the sizes that Python needs before that."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mlsys_core.config import settings
from mlsys_core.native import bind, expect, load_kernel

# The library has both too: `load` compares.
PANEL = 16  # columns of a packed weight, and slots of a block of keys
RUN = 64  # blocks of the cache whose layers stand beside each other


@cache
def load(flags: tuple[str, ...] = ()) -> Any:
    """Load the library; it is compiled for this machine on the first call ever.

    Args:
        flags: For the compiler, beside the usual ones: a test may ask for another machine's paths.

    Raises:
        MissingDependencyError: there is no C++ compiler.
        MlsysError: the compiler refuses the source.
    """
    here = Path(__file__).parent
    headers = sorted(here.glob("*.h"))
    library = bind(load_kernel(here / "program.cpp", cache_dir=settings().cache_dir, flags=flags, headers=headers))
    expect(library, PANEL=PANEL, RUN=RUN)
    return library


def address(tensor: Any) -> int | None:
    """Return the address of a tensor's memory; None stays None."""
    return None if tensor is None else tensor.data_ptr() or None
