"""The compiled kernels and their structures as ctypes sees them; the C++ headers here tell what they mean."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from mlsys_core.config import settings
from mlsys_core.native import load_kernel
from mlsys_nimble.ir import operators
from torch import Tensor

MAX_RANK = 6  # kernel.h
DTYPES = ("float32", "bfloat16", "int64", "int32", "uint8", "bool", "float64")  # kernel.h: Dtype
ACTIVATIONS = (  # math.h: Activation
    *(None, "relu", "relu6", "silu", "sigmoid", "tanh", "gelu", "gelu_tanh"),
    *("hardswish", "hardsigmoid", "leaky_relu", "elu"),
)
MAKERS = (  # kernels.cpp
    *("convolution", "depthwise", "separable", "winograd2", "winograd4", "gemv", "copy", "pad", "pointwise", "pool"),
    *("reduce", "softmax", "layer_norm", "matmul", "attention", "embedding"),
)
# Square roots and roundings become single instructions; comparisons and sums stay as they are written.
FLAGS = ("-fno-math-errno", "-fno-trapping-math")


@dataclass(frozen=True, slots=True)
class View:
    """A strided window on memory: kernel.h's View. Shapes are logical (images are N, C, H, W)."""

    address: int | None  # of element (0, 0, ...); None: what `slot` holds at the time of a run
    dtype: str  # one of DTYPES
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; 0: broadcast
    slot: int | None = None  # the address of a pointer, for tensors that are the caller's

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """The window that ``tensor`` is; it must outlive whatever uses this."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tensor.data_ptr(), dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def permuted(self, dims: Sequence[int]) -> View:
        """Dimension ``dims[i]`` as dimension i."""
        shape, strides = (tuple(values[dim] for dim in dims) for values in (self.shape, self.strides))
        return View(self.address, self.dtype, shape, strides, self.slot)

    def reshaped(self, shape: Sequence[int], strides: Sequence[int]) -> View:
        """The same memory, told differently."""
        return View(self.address, self.dtype, tuple(shape), tuple(strides), self.slot)


class ViewStruct(Structure):
    """kernel.h: View."""

    _fields_ = [
        ("data", c_void_p),
        ("slot", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * MAX_RANK),
        ("strides", c_int64 * MAX_RANK),
    ]


class EpilogueStruct(Structure):
    """epilogue.h: Epilogue."""

    _fields_ = [
        ("activation", c_int32),
        ("slope", c_float),
        ("has_residual", c_int32),
        ("activates_first", c_int32),
    ]


class ConvolutionStruct(Structure):
    """convolution.h: Convolution."""

    _fields_ = [
        ("x", ViewStruct),
        ("residual", ViewStruct),
        ("out", ViewStruct),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("kernel", c_int32 * 3),
        ("stride", c_int32 * 3),
        ("before", c_int32 * 3),
        ("dilation", c_int32 * 3),
        ("groups", c_int32),
        ("epilogue", EpilogueStruct),
    ]


class DepthwiseStruct(Structure):
    """depthwise.h: Depthwise."""

    _fields_ = [
        ("x", ViewStruct),
        ("residual", ViewStruct),
        ("out", ViewStruct),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("kernel", c_int32 * 2),
        ("stride", c_int32 * 2),
        ("before", c_int32 * 2),
        ("dilation", c_int32 * 2),
        ("epilogue", EpilogueStruct),
    ]


class SeparableStruct(Structure):
    """separable.h: Separable."""

    _fields_ = [
        ("depthwise", DepthwiseStruct),
        ("residual", ViewStruct),
        ("out", ViewStruct),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("epilogue", EpilogueStruct),
    ]


class WinogradStruct(Structure):
    """winograd.h: Winograd."""

    _fields_ = [
        ("x", ViewStruct),
        ("residual", ViewStruct),
        ("out", ViewStruct),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("before", c_int32 * 2),
        ("epilogue", EpilogueStruct),
    ]


class GemvStruct(Structure):
    """gemv.h: Gemv."""

    _fields_ = [
        ("x", ViewStruct),
        ("residual", ViewStruct),
        ("out", ViewStruct),
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("epilogue", EpilogueStruct),
    ]


class CopyStruct(Structure):
    """copy.h: Copy."""

    _fields_ = [("x", ViewStruct), ("out", ViewStruct)]


class PadStruct(Structure):
    """copy.h: Pad."""

    _fields_ = [("x", ViewStruct), ("out", ViewStruct), ("before", c_int64 * MAX_RANK), ("value", c_double)]


class StepStruct(Structure):
    """pointwise.h: Step."""

    _fields_ = [("op", c_int32), ("registers", c_int32 * 3), ("constants", c_double * 3), ("target", c_int32)]


class PointwiseStruct(Structure):
    """pointwise.h: Pointwise."""

    _fields_ = [
        ("inputs", c_void_p),
        ("num_inputs", c_int32),
        ("num_registers", c_int32),
        ("steps", c_void_p),
        ("num_steps", c_int32),
        ("is_wide", c_int32),
        ("is_integral", c_int32),
        ("out", ViewStruct),
    ]


class PoolStruct(Structure):
    """pool.h: Pool."""

    _fields_ = [
        ("x", ViewStruct),
        ("residual", ViewStruct),
        ("out", ViewStruct),
        ("kernel", c_int32 * 3),
        ("stride", c_int32 * 3),
        ("before", c_int32 * 3),
        ("dilation", c_int32 * 3),
        ("is_average", c_int32),
        ("counts_padding", c_int32),
        ("epilogue", EpilogueStruct),
    ]


class ReduceStruct(Structure):
    """rows.h: Reduce."""

    _fields_ = [("x", ViewStruct), ("reduced", ViewStruct), ("out", ViewStruct), ("op", c_int32)]


class RowsStruct(Structure):
    """rows.h: Rows."""

    _fields_ = [
        ("x", ViewStruct),
        ("out", ViewStruct),
        ("x_row", ViewStruct),
        ("out_row", ViewStruct),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("is_log", c_int32),
    ]


class MatMulStruct(Structure):
    """attention.h: MatMul."""

    _fields_ = [("a", ViewStruct), ("b", ViewStruct), ("out", ViewStruct), ("scale", c_float)]


class AttentionStruct(Structure):
    """attention.h: Attention."""

    _fields_ = [
        ("q", ViewStruct),
        ("k", ViewStruct),
        ("v", ViewStruct),
        ("mask", ViewStruct),
        ("out", ViewStruct),
        ("scale", c_float),
        ("is_causal", c_int32),
        ("has_zero_rows", c_int32),
    ]


class EmbeddingStruct(Structure):
    """rows.h: Embedding."""

    _fields_ = [
        ("table", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("indices", ViewStruct),
        ("out", ViewStruct),
        ("fault", c_void_p),
    ]


def view_struct(view: View | None) -> ViewStruct:
    """As the library takes it; None: an absent tensor, all zeros."""
    struct = ViewStruct()
    if view is not None:
        assert len(view.shape) <= MAX_RANK, f"{len(view.shape)} dimensions, {MAX_RANK} are allowed"
        struct.data, struct.slot = view.address, view.slot
        struct.dtype, struct.rank = DTYPES.index(view.dtype), len(view.shape)
        struct.shape[: len(view.shape)] = view.shape
        struct.strides[: len(view.shape)] = view.strides
    return struct


def epilogue_struct(epilogue: operators.Epilogue) -> EpilogueStruct:
    """As the library takes it."""
    return EpilogueStruct(
        ACTIVATIONS.index(epilogue.activation), epilogue.slope, epilogue.has_residual, epilogue.activates_first
    )


@cache
def load(flags: tuple[str, ...] = (), *, source: str = "kernels.cpp", makers: tuple[str, ...] = MAKERS) -> Any:
    """A library of kernels, compiled for this machine on the first call ever; all but bf16's are in ``kernels.cpp``.

    Args:
        flags: For the compiler, beside the usual ones: a test may ask for another machine's paths.
        source: The file beside this one.
        makers: The kernels in it.

    Raises:
        MissingDependencyError: there is no C++ compiler.
        MlsysError: the compiler refuses the source.
    """
    here = Path(__file__).parent
    headers = sorted(here.glob("*.h"))
    options = (*FLAGS, *flags)
    library: Any = load_kernel(here / source, cache_dir=settings().cache_dir, flags=options, headers=headers)
    library.kernel_units.argtypes = library.kernel_scratch.argtypes = library.kernel_free.argtypes = [c_void_p]
    library.kernel_units.restype = library.kernel_scratch.restype = c_int64
    library.kernel_run.argtypes = [c_void_p, c_int64, c_int64, c_void_p]
    for name in makers:
        make = getattr(library, f"make_{name}")
        make.restype, make.argtypes = c_void_p, [c_void_p]
    library.weight_dtype = torch.float32
    return library


@cache
def load_bf16(flags: tuple[str, ...] = ()) -> Any:
    """The library whose linears and convolutions keep their weights in bf16; as :func:`load`."""
    library = load(flags, source="kernels_bf16.cpp", makers=("convolution", "gemv"))
    library.weight_dtype = torch.bfloat16
    return library


class Kernel:
    """One operator with its arguments bound; freed with this object, which keeps alive what it was made of.

    Attributes:
        fault: Set by a run that met values it cannot compute with; None: there are none.
    """

    def __init__(
        self, library: Any, name: str, arguments: Structure, *keep: object, fault: c_int32 | None = None
    ) -> None:
        self.address: int = getattr(library, f"make_{name}")(ctypes.byref(arguments))
        self.units: int = library.kernel_units(self.address)
        self.scratch_nbytes: int = library.kernel_scratch(self.address)
        self.name = name
        self.fault = fault
        self._library = library
        self._keep = keep

    def run(self, begin: int = 0, end: int | None = None, *, scratch: Tensor | None = None) -> None:
        """Units ``begin`` to ``end - 1`` on this thread; for tests and measurements.

        Args:
            begin: The first unit.
            end: One past the last; None: all.
            scratch: ``scratch_nbytes`` bytes; None: of this call's own.
        """
        if scratch is None:
            scratch = torch.empty(self.scratch_nbytes, dtype=torch.uint8)
        self._library.kernel_run(self.address, begin, self.units if end is None else end, scratch.data_ptr())

    def __del__(self) -> None:
        self._library.kernel_free(self.address)
