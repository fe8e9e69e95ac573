"""The compiled program and its structures as ctypes sees them; the C++ files beside this one tell what they mean."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from mlsys_core.config import settings
from mlsys_core.native import load_kernel

PANEL = 16  # vec.h: columns of a packed weight, and slots of a block of keys
RUN = 64  # attention.h: blocks of the cache whose layers stand beside each other
KINDS = ("fp32", "bf16", "int8", "int4", "bf16-pairs")  # weights.h: Kind
ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu")  # vec.h: Activation
CACHES = ("fp32", "bf16", "bf16-pairs")  # program.cpp: CacheKind


class Matrix(Structure):
    """weights.h: Matrix."""

    _fields_ = [
        ("kind", c_int32),
        ("columns", c_int32),
        ("depth", c_int32),
        ("group", c_int32),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("has_halves", c_int32),
        ("takes_bf16", c_int32),
    ]


class Norm(Structure):
    """rows.h: Norm."""

    _fields_ = [("kind", c_int32), ("size", c_int32), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p)]


class Gemm(Structure):
    """program.cpp: Gemm."""

    _fields_ = [
        ("matrix", Matrix),
        ("norm", Norm),
        ("bias", c_void_p),
        ("source", c_int32),
        ("target", c_int32),
        ("activation", c_int32),
        ("is_gated", c_int32),
        ("accumulates", c_int32),
    ]


class Attention(Structure):
    """attention.h: Attention."""

    _fields_ = [
        ("source", c_int32),
        ("target", c_int32),
        ("layer", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("rotary", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("norm_eps", c_float),
        ("head_norm", c_void_p),
        ("only_sampled", c_int32),
    ]


class Normalise(Structure):
    """program.cpp: Normalise."""

    _fields_ = [("norm", Norm), ("source", c_int32), ("target", c_int32), ("accumulates", c_int32)]


class GatherRows(Structure):
    """program.cpp: GatherRows."""

    _fields_ = [("taken", c_int32)]


class Batch(Structure):
    """program.cpp: Batch."""

    _fields_ = [
        ("num_rows", c_int32),
        ("num_spans", c_int32),
        ("num_sampled", c_int32),
        ("spans", c_void_p),
        ("block_tables", c_void_p),
        ("sampled", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("states", c_void_p),
        ("logits", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_layers", c_int32),
        ("cache", c_int32),
        ("seconds", c_void_p),
        ("largest", c_void_p),
    ]


class Codes(Structure):
    """lookup.h: Codes."""

    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("rows", c_int64),
        ("depth", c_int32),
        ("group", c_int32),
        ("bits", c_int32),
        ("has_halves", c_int32),
    ]


OPERATORS = {Gemm: "gemm", Attention: "attention", Normalise: "normalise", GatherRows: "gather_rows"}  # orca_add_NAME


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
    library = load_kernel(
        here / "program.cpp", cache_dir=settings().cache_dir, flags=flags, headers=sorted(here.glob("*.h"))
    )
    library.orca_program.restype = c_void_p
    library.orca_program.argtypes = [c_int32, c_int32, c_int32, c_void_p]
    library.orca_free.argtypes = [c_void_p]
    for structure, name in OPERATORS.items():
        getattr(library, f"orca_add_{name}").argtypes = [c_void_p, POINTER(structure)]
    library.orca_run.argtypes = [c_void_p, POINTER(Batch)]
    library.orca_pack.argtypes = [c_void_p, c_void_p, *[c_int32] * 6]
    library.orca_look_up.argtypes = [POINTER(Codes), c_void_p, c_int32, c_void_p]
    return library


def address(tensor: Any) -> int | None:
    """Return the address of a tensor's memory; None stays None."""
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr()).value
