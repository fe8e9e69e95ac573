"""The compiled kernels: views of memory, loading, and binding one kernel to its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from mlsys_core.native import Kernel as Source
from mlsys_core.native import Struct, bind, expect, new
from mlsys_nimble.backends.cpu.own_weights import Own
from mlsys_nimble.ir import operators
from mlsys_nimble.ir.sizes import Size
from mlsys_nimble.planning.layout import BAND_CHANNELS
from torch import Tensor

# Needed before a library is loaded, which has them too: `load` compares.
MAX_RANK = 6
SPACE = 3  # depth, height, width
ROW_VECS = 8  # vectors of a panel of `gemv`
DTYPES = ("float32", "bfloat16", "int64", "int32", "uint8", "bool", "float64")
# Square roots and roundings become single instructions; comparisons and sums stay as they are written.
FLAGS = ("-fno-math-errno", "-fno-trapping-math")
_HERE = Path(__file__).parent
_HEADERS = (*sorted(_HERE.glob("*.h")), _HERE.parents[1] / "state" / "digest.h")
KERNELS = Source(_HERE / "kernels.cpp", headers=_HEADERS, flags=FLAGS, compile_s=15)
KERNELS_BF16 = Source(_HERE / "kernels_bf16.cpp", headers=_HEADERS, flags=FLAGS, compile_s=10)
KERNELS_INT8 = Source(_HERE / "kernels_int8.cpp", headers=_HEADERS, flags=FLAGS, compile_s=5)


@dataclass(frozen=True, slots=True)
class View:
    """Strided window on memory (kernel.h: View). Shapes are logical (images are N, C, H, W)."""

    address: int | None  # address of element (0, 0, ...); None: read from `slot` at each run
    dtype: str  # one of DTYPES
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; 0: broadcast
    slot: int | None = None  # the address of a pointer, for tensors that are the caller's
    slot_offset_nbytes: int = 0  # from the slot's pointer to element (0, 0, ...)

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Return a view of ``tensor``, which must outlive it."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tensor.data_ptr(), dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def permuted(self, dims: Sequence[int]) -> View:
        """Return the view with dimension ``dims[i]`` as dimension i."""
        shape, strides = (tuple(values[dim] for dim in dims) for values in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides)

    def reshaped(self, shape: Sequence[int], strides: Sequence[int]) -> View:
        """Return a view of the same memory with another shape."""
        return replace(self, shape=tuple(shape), strides=tuple(strides))


def _fields(value: Any) -> Any:
    """Return ``value`` as :func:`mlsys_core.native.new` takes it: views, epilogues and mappings as their fields."""
    if isinstance(value, View):
        return {
            "data": value.address,
            "slot": value.slot,
            "slot_offset_nbytes": value.slot_offset_nbytes,
            "dtype": value.dtype,
            "rank": len(value.shape),
            "shape": value.shape,
            "strides": value.strides,
        }
    if isinstance(value, operators.Epilogue):
        return {
            "activation": value.activation or "identity",
            "slope": value.slope,
            "has_residual": value.has_residual,
            "activates_first": value.activates_first,
        }
    return {name: _fields(each) for name, each in value.items()} if isinstance(value, dict) else value


@dataclass(frozen=True, slots=True)
class Varying:
    """Place of one number of a kernel's arguments that depends on the call's sizes."""

    address: int
    nbytes: int  # 8, or 4
    size: Size


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Arguments of which a kernel was made, and can be made again with other sizes."""

    maker: int  # address of its function
    arguments: Any  # the struct
    fields: Any  # arguments of the kernel
    arrays: tuple[Any, ...]  # memory that it points to, from :func:`array_of`

    def varying(self) -> list[Varying]:
        """Return its numbers that depend on sizes, in the struct and in the arrays."""
        made = ((self.arguments, self.fields), *((array, array.fields) for array in self.arrays))
        return [each for struct, fields in made for each in _varying(type(struct), fields, ctypes.addressof(struct))]


def _varying(kind: Any, value: Any, address: int) -> Iterator[Varying]:
    """Yield the sizes in a struct's fields as :func:`mlsys_core.native.new` takes them."""
    if isinstance(value, Size):
        yield Varying(address, ctypes.sizeof(kind), value)
    elif isinstance(value, dict):
        for name, field_kind, *_ in kind._fields_:
            yield from _varying(field_kind, value[name], address + getattr(kind, name).offset)
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _varying(kind._type_, part, address + number * ctypes.sizeof(kind._type_))


def array_of(struct: type[Struct], values: Sequence[View | dict[str, Any]]) -> ctypes.Array[Struct]:
    """Return a C array of structs; one element, zeros, if there are no ``values``."""
    fields = [_fields(value) for value in values]
    made = (struct * max(len(values), 1))(*(new(struct, **each) for each in fields))
    made.fields = fields  # type: ignore[attr-defined]
    return made


@cache
def load(source: Source = KERNELS) -> Any:
    """Load a library of kernels; without the wheel's, the first call ever compiles it for this machine.

    Args:
        source: :data:`KERNELS` has all kernels but those of bf16 weights.

    Raises:
        MissingDependencyError: there is no C++ compiler.
        MlsysError: the compiler refuses the source.
    """
    library = bind(source.load())
    expect(library, MAX_RANK=MAX_RANK, SPACE=SPACE, ROW_VECS=ROW_VECS, BAND_CHANNELS=BAND_CHANNELS, Dtype=DTYPES)
    library.weight_dtype = torch.float32
    return library


@cache
def load_bf16() -> Any:
    """Load the library whose linears and convolutions keep their weights in bf16; see :func:`load`."""
    library = load(KERNELS_BF16)
    library.weight_dtype = torch.bfloat16
    return library


@cache
def load_int8() -> Any:
    """Load the library of int8 kernels; see :func:`load`."""
    library = bind(KERNELS_INT8.load())
    expect(library, MAX_RANK=MAX_RANK, SPACE=SPACE, Dtype=DTYPES)
    return library


class Kernel:
    """One operator with its arguments bound; freed with this object, which keeps alive what it was made of.

    Args:
        library: A library of kernels.
        name: Name of the kernel: the library has a function ``make_NAME``.
        arguments: The fields of the struct that the function takes, views and epilogues as they are; or the kernel
            that this one finishes.
        keep: Tensors and kernels that this kernel reads.
        fault: Set by a run that meets values it cannot compute with; None: there are none.
    """

    def __init__(
        self,
        library: Any,
        name: str,
        arguments: dict[str, Any] | Kernel,
        *keep: object,
        fault: ctypes.c_int32 | None = None,
    ) -> None:
        self.blueprint: Blueprint | None = None  # set if the kernel was made from arguments
        make = getattr(library, f"make_{name}")
        if isinstance(arguments, Kernel):
            self.address: int = make(arguments.address)
            keep = (arguments, *keep)
        else:
            fields = _fields(arguments)
            struct = new(make.argtypes[0]._type_, **fields)
            self.address = make(struct)
            arrays = tuple(each for each in keep if hasattr(each, "fields"))
            maker = ctypes.cast(make, ctypes.c_void_p).value or 0
            self.blueprint = Blueprint(maker, struct, fields, arrays)
        self.units: int = library.kernel_units(self.address)
        self.scratch_nbytes: int = library.kernel_scratch(self.address)
        self.name = name
        self.fault = fault
        self._library = library
        self._keep = keep

    @property
    def packed(self) -> list[Tensor]:
        """Return the packed weights that it reads, in the order in which they were packed."""
        return [each for each in self._keep if isinstance(each, Tensor)]

    @property
    def is_in_place(self) -> bool:
        """Return whether it reads a weight where it lies, in place of a packed copy."""
        return any(isinstance(each, Own) for each in self._keep)

    def run(self, begin: int = 0, end: int | None = None, *, scratch: Tensor | None = None) -> None:
        """Run units ``begin`` to ``end - 1`` on this thread; for tests and measurements.

        Args:
            begin: The first unit.
            end: One past the last; None: all.
            scratch: ``scratch_nbytes`` bytes; None: of this call's own.
        """
        if scratch is None:
            scratch = torch.empty(self.scratch_nbytes, dtype=torch.uint8)
        self._library.kernel_run(self.address, begin, self.units if end is None else end, scratch.data_ptr())

    def __del__(self) -> None:
        if hasattr(self, "address"):
            self._library.kernel_free(self.address)
