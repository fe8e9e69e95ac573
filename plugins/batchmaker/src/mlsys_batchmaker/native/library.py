"""The compiled loops and their structures as ctypes sees them; ``steps.cpp`` tells what they mean."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from mlsys_core.config import settings
from mlsys_core.native import load_kernel


class Matrix(Structure):
    """product.h: Matrix."""

    _fields_ = [("panels", c_void_p), ("depth", c_int64)]


class Layer(Structure):
    """steps.cpp: Layer."""

    _fields_ = [
        ("kind", c_int32),
        ("hidden", c_int32),
        ("from_input", Matrix),
        ("from_hidden", Matrix),
        ("from_other", Matrix),
        ("bias", c_void_p),
        ("hidden_bias", c_void_p),
    ]


class Cell(Structure):
    """steps.cpp: Cell."""

    _fields_ = [
        ("num_layers", c_int32),
        ("num_words", c_int32),
        ("layers", POINTER(Layer)),
        ("table", c_void_p),
        ("embedding", c_void_p),
        ("projection", Matrix),
        ("word_bias", c_void_p),
        ("stop", c_int64),
    ]


class Task(Structure):
    """steps.cpp: Task."""

    _fields_ = [
        ("rows", c_int32),
        ("steps", c_int32),
        ("in_rows", c_void_p),
        ("in_step", c_int64),
        ("in_row", c_int64),
        ("out_rows", c_void_p),
        ("out_row", c_int64),
        ("lengths", c_void_p),
        ("in_banks", c_void_p),
        ("out_banks", c_void_p),
        ("in_strides", c_void_p),
        ("out_strides", c_void_p),
    ]


@cache
def load(flags: tuple[str, ...] = ()) -> Any:
    """Load the library; the first call ever compiles it for this machine.

    Args:
        flags: for the compiler, beside the usual ones: a test may ask for another machine's width.

    Raises:
        MissingDependencyError: there is no C++ compiler.
        MlsysError: the compiler refuses the source.
    """
    here = Path(__file__).parent
    library = load_kernel(
        here / "steps.cpp", cache_dir=settings().cache_dir, flags=flags, headers=sorted(here.glob("*.h"))
    )
    library.batchmaker_units.restype = c_int64  # product.h: columns of a panel
    library.batchmaker_runner.restype = c_void_p
    library.batchmaker_runner.argtypes = [POINTER(Cell)]
    library.batchmaker_free.argtypes = [c_void_p]
    library.batchmaker_run.restype = c_int64
    library.batchmaker_run.argtypes = [c_void_p, POINTER(Task)]
    library.batchmaker_results.argtypes = [c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_void_p]
    library.batchmaker_pack.argtypes = [c_void_p, c_void_p, c_int64, c_int32, c_int32]
    return library


def pointers(addresses: list[int]) -> Any:
    """Return an array of addresses for C."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def numbers(values: list[int]) -> Any:
    """Return an array of int64 for C."""
    return (ctypes.c_int64 * len(values))(*values)
