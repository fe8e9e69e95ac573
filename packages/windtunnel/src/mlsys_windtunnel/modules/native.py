"""The C++ kernel of trees and linear models: what answers without gradients, on a CPU in float64.

The kernel is ``native/models.cpp``; where there is no compiler, numpy and torch answer.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy.typing as npt
from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native import Kernel, bind, warn_without_kernels

MODELS = Kernel(Path(__file__).parent.parent / "native" / "models.cpp")


@lru_cache(maxsize=1)
def kernel() -> Any:
    """Load the compiled kernel; the first call ever on a machine builds it (seconds). None where that fails."""
    try:
        return bind(MODELS.load())
    except KernelUnavailableError as error:
        warn_without_kernels("WindTunnel", "numpy and torch answer, in several times the time", error)
        return None


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first number.

    Quicker than ``array.ctypes.data`` where the array is contiguous and writable.
    """
    try:
        return ctypes.addressof(ctypes.c_double.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, strided or empty
        return array.ctypes.data
