"""Structs, enums, constants and functions of a library, from what its C++ declares: nothing is written twice.

A source includes ``<mlsys/layout.h>`` and names what it shares with Python. :func:`bind` reads that from the loaded
library, builds the ctypes side and compares each size and offset; :func:`~.structs.new` fills a struct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mlsys_core.errors import KernelUnavailableError
from mlsys_core.native.structs import Struct, converter

_NUMBERS: dict[str, Any] = {
    **{f"i{size}": getattr(ctypes, f"c_int{8 * size}") for size in (1, 2, 4, 8)},
    **{f"u{size}": getattr(ctypes, f"c_uint{8 * size}") for size in (1, 2, 4, 8)},
    "f4": ctypes.c_float,
    "f8": ctypes.c_double,
    "p": ctypes.c_void_p,
    "v": None,
}


def bind(library: Any, *, by_address: bool = False) -> Any:
    """Give ``library`` what it declares, and return it.

    It gets ``structs`` (classes by name), ``enums`` (by name: values by enumerator, in lower case) and ``constants``;
    its declared functions get their argument and result types.

    Args:
        library: From :func:`load_kernel`.
        by_address: Functions take structs as integers from ``ctypes.addressof``, unchecked: for calls of a
            microsecond, since ``byref`` and its check take .15 us an argument.

    Raises:
        KernelUnavailableError: ctypes lays a struct out in another way than the library's compiler did.
    """
    library.mlsys_declarations.restype = ctypes.c_char_p
    library.structs, library.enums, library.constants = {}, {}, {}
    library.by_address = by_address
    for line in library.mlsys_declarations().decode().splitlines():
        kind, *parts = line.split("|")
        _READERS[kind](library, *parts)
    return library


def expect(library: Any, **expected: int | tuple[str, ...]) -> None:
    """Compare numbers and names that Python needs before the library is loaded with the library's own.

    Args:
        library: One that :func:`bind` returned.
        expected: Constants, and enumerators of an enum in their order, in lower case.

    Raises:
        KernelUnavailableError: they differ.
    """
    for name, value in expected.items():
        found = tuple(library.enums[name]) if isinstance(value, tuple) else library.constants[name]
        if found != value:
            raise KernelUnavailableError(
                f"{_name(library)} has {name} = {found}, its caller {value}: both must be equal"
            )


def _read_struct(library: Any, name: str, names: str, size: str, *places: str) -> None:
    fields: list[tuple[str, Any, tuple[str, ...]]] = []
    offsets: list[int] = []
    for field, place in zip(names.split(", "), places, strict=True):
        code, _, offset = place.partition("@")
        fields.append((field, _type_of(library, code), tuple(library.enums.get(code, ()))))
        offsets.append(int(offset))
    struct: Any = _struct(name, tuple(fields))
    found = [getattr(struct, field).offset for field, *_ in fields]
    if found != offsets or ctypes.sizeof(struct) != int(size):
        raise KernelUnavailableError(
            f"{_name(library)} was compiled with {name} of {size} bytes and fields at {offsets}; Python has it of "
            f"{ctypes.sizeof(struct)} bytes and fields at {found}. Set CXX to this platform's own compiler"
        )
    library.structs[name] = struct


@cache  # libraries that declare the same struct share its class
def _struct(name: str, fields: tuple[tuple[str, Any, tuple[str, ...]], ...]) -> Any:
    converters = {field: converter(kind, enumerators) for field, kind, enumerators in fields}
    body = {
        "__slots__": (),
        "_fields_": [(field, kind) for field, kind, _ in fields],
        "names": frozenset(converters),
        "converters": {field: convert for field, convert in converters.items() if convert is not None},
    }
    return type(name, (Struct,), body)


def _read_enum(library: Any, name: str, names: str) -> None:
    library.enums[name] = {each: value for value, each in enumerate(names.lower().split(", "))}


def _read_constants(library: Any, names: str, *values: str) -> None:
    library.constants.update(zip(names.split(", "), map(int, values), strict=True))


def _read_functions(library: Any, names: str, *signatures: str) -> None:
    for name, signature in zip(names.split(", "), signatures, strict=True):
        result, *arguments = [_type_of(library, code, in_call=True) for code in signature.split()]
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


_READERS: dict[str, Callable[..., None]] = {
    "struct": _read_struct,
    "enum": _read_enum,
    "constants": _read_constants,
    "functions": _read_functions,
}


def _type_of(library: Any, code: str, *, in_call: bool = False) -> Any:
    element, _, count = code.removesuffix("]").partition("[")
    if element.startswith("*"):  # in a struct only the address counts
        is_checked = in_call and not library.by_address
        return ctypes.POINTER(library.structs[element[1:]]) if is_checked else ctypes.c_void_p
    if element in _NUMBERS:
        kind = _NUMBERS[element]
    else:
        kind = ctypes.c_int32 if element in library.enums else library.structs[element]
    return kind * int(count) if count else kind


def _name(library: Any) -> str:
    return Path(library._name).name
