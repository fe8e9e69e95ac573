"""The compiled layers (``encoder.cpp``)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from mlsys_core.native import Kernel, bind

_HERE = Path(__file__).parent
ENCODER = Kernel(_HERE / "encoder.cpp", headers=tuple(sorted(_HERE.glob("*.h"))), compile_s=8)


@cache
def load(flags: tuple[str, ...] = ()) -> Any:
    """Load the library; the first call ever compiles it for this machine.

    Args:
        flags: For the compiler, beside the usual ones: a test may ask for another machine's width.

    Raises:
        KernelUnavailableError: There is no C++ compiler, or it refuses the source.
    """
    return bind(ENCODER.load(flags))
