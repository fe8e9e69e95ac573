"""The compiled loops (``steps.cpp``), and arrays for them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from mlsys_core.native import Kernel, bind

_HERE = Path(__file__).parent
STEPS = Kernel(_HERE / "steps.cpp", headers=tuple(sorted(_HERE.glob("*.h"))))


@cache
def load(flags: tuple[str, ...] = ()) -> Any:
    """Load the library; the first call ever compiles it for this machine.

    Args:
        flags: for the compiler, beside the usual ones: a test may ask for another machine's width.

    Raises:
        KernelUnavailableError: there is no library and no C++ compiler.
        MlsysError: the compiler refuses the source.
    """
    return bind(STEPS.load(flags))


def pointers(addresses: list[int]) -> Any:
    """Return an array of addresses for C."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def numbers(values: list[int]) -> Any:
    """Return an array of int64 for C."""
    return (ctypes.c_int64 * len(values))(*values)
