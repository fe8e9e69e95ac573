"""The compiled program: loading, and the sizes that Python needs before that."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mlsys_core.native import Kernel, bind, expect

# The library has both too: `load` compares.
PANEL = 16  # columns of a packed weight, and slots of a block of keys
RUN = 64  # blocks of the cache whose layers stand beside each other

_HERE = Path(__file__).parent
PROGRAM = Kernel(_HERE / "program.cpp", headers=tuple(sorted(_HERE.glob("*.h"))), compile_s=15)


@cache
def load(flags: tuple[str, ...] = ()) -> Any:
    """Load the library: the wheel's, or one compiled for this machine on the first call ever.

    Args:
        flags: For the compiler, beside the usual ones: a test may ask for another machine's paths.

    Raises:
        MissingDependencyError: there is no C++ compiler.
        MlsysError: the compiler refuses the source.
    """
    library = bind(PROGRAM.load(flags))
    expect(library, PANEL=PANEL, RUN=RUN)
    return library


def address(tensor: Any) -> int | None:
    """Return the address of a tensor's memory; None stays None."""
    return None if tensor is None else tensor.data_ptr() or None
