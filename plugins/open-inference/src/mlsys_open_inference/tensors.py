"""Tensors between the wire and numpy: raw bytes, JSON values, and back. Pure; inexact values are refused.

Raw data is little-endian and row-major; numbers are viewed, not copied, where they lie aligned.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_serving.models.datatypes import Array, DataType

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16  # elements
_IS_LITTLE_ENDIAN = sys.byteorder == "little"


def from_raw(raw: memoryview, datatype: DataType, shape: Sequence[int], *, what: str) -> Array:
    r"""Return the array that ``raw`` holds.

    Args:
        raw: exactly the tensor's bytes; keep them unchanged while the array lives.
        datatype: of the elements.
        shape: sizes, 0 or more.
        what: names the tensor in errors.

    Returns:
        dtype ``datatype.dtype``, aligned, read-only; a view of ``raw`` unless that lies askew or needs conversion.

    Raises:
        InvalidInputError: ``raw`` has not the size that shape and datatype call for, or holds no such elements.

    Example:
        >>> from_raw(memoryview(b"\x01\x00\x02\x00"), DataType.INT16, [2], what="x")
        array([1, 2], dtype=int16)
    """
    num_elements = math.prod(shape)
    if datatype is DataType.BYTES:
        return _bytes_from_raw(raw, num_elements, what).reshape(shape)
    nbytes = num_elements * (datatype.itemsize or 0)
    if len(raw) != nbytes:
        raise InvalidInputError(
            f"{what} has {len(raw)} bytes of data, but {datatype.value} of shape {list(shape)} takes {nbytes}"
        )
    if datatype is DataType.BF16:
        return _widened(np.frombuffer(raw, "<u2")).reshape(shape)
    if datatype is DataType.BOOL:
        array = np.frombuffer(raw, np.uint8)
        if array.size and array.max() > 1:
            raise InvalidInputError(f"{what} is BOOL and holds a byte other than 0 and 1")
        return array.view(np.bool_).reshape(shape)
    array = np.frombuffer(raw, datatype.dtype)
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    if not _IS_LITTLE_ENDIAN:
        array = array.byteswap()
    return array.reshape(shape)


def to_raw(array: Array, datatype: DataType) -> bytes | memoryview:
    r"""Return the bytes of ``array``, whose dtype is ``datatype.dtype``; a view where it is contiguous.

    Example:
        >>> bytes(to_raw(np.array([b"ab", b""], dtype=object), DataType.BYTES))
        b'\x02\x00\x00\x00ab\x00\x00\x00\x00'
    """
    if datatype is DataType.BYTES:
        return b"".join(_LENGTH.pack(len(element)) + element for element in array.ravel().tolist())
    if datatype is DataType.BF16:
        array = _narrowed(array)
    if not _IS_LITTLE_ENDIAN:
        array = array.byteswap()
    return array.tobytes() if array.nbytes < 4096 or not array.flags.c_contiguous else array.data.cast("B")


def from_values(values: Any, datatype: DataType, shape: Sequence[int], *, what: str) -> Array:
    """Return the array of a JSON array or of numbers read from one, flat or nested as ``shape`` says.

    Raises:
        InvalidInputError: another number of elements, another nesting, or elements that are not of the datatype.

    Example:
        >>> from_values([[1, 2.5]], DataType.FP32, [1, 2], what="x")
        array([[1. , 2.5]], dtype=float32)
    """
    if not isinstance(values, list | np.ndarray):
        raise InvalidInputError(f"{what}: 'data' is an array, got {type(values).__name__}")
    if isinstance(values, np.ndarray):
        array: Array = values
    elif datatype is DataType.BYTES:
        array = _texts(values, what)
    else:
        if datatype is not DataType.BOOL and _has_booleans(values):  # numpy makes 1 of true beside numbers
            raise InvalidInputError(f"{what}: its elements are not all {datatype.value}")
        try:
            array = _natural(values, datatype)
        except ValueError as error:
            raise InvalidInputError(f"{what}: the arrays nested in 'data' have different lengths") from error
        except OverflowError as error:
            raise InvalidInputError(f"{what}: an element is too large for a double") from error
    if array.size != math.prod(shape):
        raise InvalidInputError(
            f"{what} has {array.size} elements of data, but shape {list(shape)} takes {math.prod(shape)}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidInputError(f"{what}: an element is too large for a double")
    if array.ndim > 1 and array.shape != tuple(shape):
        raise InvalidInputError(f"{what}: 'data' is nested as {list(array.shape)}, but its shape is {list(shape)}")
    if datatype is not DataType.BYTES:
        array = _exact(array, datatype, what)
    elif array.dtype != np.object_:
        raise InvalidInputError(f"{what}: its elements are not all BYTES, which JSON has as strings")
    return array.reshape(shape)


def to_values(array: Array, datatype: DataType, *, what: str) -> list[Any]:
    """Return the elements of ``array`` as JSON values, flat.

    Raises:
        InvalidInputError: JSON cannot hold them (NaN, infinity, bytes that are no UTF-8).
    """
    if datatype is DataType.BYTES:
        try:
            return [element.decode("utf-8") for element in array.ravel().tolist()]
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"{what} holds bytes that are no UTF-8, which JSON cannot: ask for it with 'binary_data': true"
            ) from error
    if datatype is DataType.BF16:
        array = _widened(_narrowed(array))
    if datatype.is_floating and not np.isfinite(array).all():
        raise InvalidInputError(f"{what} holds NaN or infinity, which JSON cannot: ask for it with 'binary_data': true")
    values: list[Any] = array.ravel().tolist()
    return values


def from_numbers(values: Sequence[Any], datatype: DataType, shape: Sequence[int], *, what: str) -> Array:
    """Return the array of a typed, flat sequence of numbers; their range may be larger than the datatype's.

    Raises:
        InvalidInputError: another number of elements, or one out of range.
    """
    if len(values) != math.prod(shape):
        raise InvalidInputError(
            f"{what} has {len(values)} elements of data, but shape {list(shape)} takes {math.prod(shape)}"
        )
    return _exact(_natural(values, datatype), datatype, what).reshape(shape)


def from_elements(elements: list[bytes], shape: Sequence[int], *, what: str) -> Array:
    """Return the array of the elements of a BYTES tensor.

    Raises:
        InvalidInputError: another number of elements.
    """
    if len(elements) != math.prod(shape):
        raise InvalidInputError(
            f"{what} has {len(elements)} elements of data, but shape {list(shape)} takes {math.prod(shape)}"
        )
    return _objects(elements).reshape(shape)


def conformed(array: Array, datatype: DataType, *, what: str) -> Array:
    """Check that a model's output is an array of ``datatype.dtype`` and return it.

    Raises:
        ServingError: it is of another dtype, or an element of BYTES is not ``bytes``.
    """
    if array.dtype != datatype.dtype:
        raise ServingError(f"{what} should be {datatype.value} ({datatype.dtype}), the model gave {array.dtype}")
    if datatype is DataType.BYTES and not all(type(element) is bytes for element in array.ravel().tolist()):
        raise ServingError(f"{what} should be BYTES: the model gave elements that are not of type bytes")
    return array


def _natural(values: Sequence[Any], datatype: DataType) -> Array:
    """Return numpy's array of numbers, but exact for integers of 64 bits and more.

    numpy makes doubles of integers on both sides of 2**63, and objects of those from 2**64 on (as JavaScript writes
    1e20).

    Raises:
        ValueError: the nested sequences have different lengths.
        OverflowError: floats are wanted, and an integer is too large for a double.
    """
    # In pieces, since a call keeps the interpreter's lock to its end; in one if they are not all of one kind.
    pieces = [np.array(values[start : start + _PIECE]) for start in range(0, len(values), _PIECE)]
    is_alike = len({(piece.dtype, piece.shape[1:]) for piece in pieces}) == 1
    array = np.concatenate(pieces) if is_alike else np.array(values)
    if array.dtype.kind == "O" and datatype.is_floating:
        is_number = all(type(element) in (int, float) for element in array.ravel().tolist())
        return array.astype(np.float64) if is_number else array
    if array.dtype.kind in "fO" and array.size and datatype is DataType.UINT64:
        elements = np.array(values, np.object_)
        if all(type(element) is int and 0 <= element < 2**64 for element in elements.ravel().tolist()):
            return elements.astype(np.uint64)
    return array


def _exact(array: Array, datatype: DataType, what: str) -> Array:
    """Return ``array``, as numpy made it of numbers, in ``datatype``; only floats may lose precision."""
    if array.size == 0:
        return array.astype(datatype.dtype)
    kind = array.dtype.kind
    if datatype.is_floating and kind in "iuf":
        with np.errstate(over="ignore"):  # too large becomes infinity, as in the client's own conversion
            return array.astype(datatype.dtype)
    if datatype.dtype.kind in "iu" and kind in "iu":
        limits = np.iinfo(datatype.dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise InvalidInputError(f"{what}: an element is out of the range of {datatype.value}")
        return array.astype(datatype.dtype)
    if datatype is DataType.BOOL and kind == "b":
        return array
    raise InvalidInputError(f"{what}: its elements are not all {datatype.value}")


def _has_booleans(values: list[Any]) -> bool:
    """Return whether there is true or false among JSON values, at any depth."""
    kinds = set(map(type, values))
    if bool in kinds:
        return True
    return list in kinds and any(_has_booleans(each) for each in values if type(each) is list)


def _texts(values: list[Any], what: str) -> Array:
    """Return an object array of nested lists of strings; numpy's own would drop trailing NULs."""
    depth, node = 1, values
    while node and isinstance(node[0], list):
        node, depth = node[0], depth + 1
    shape: list[int] = []
    for _ in range(depth):
        shape.append(len(values) if not shape else len(values[0]))
        if shape[1:] and any(not isinstance(child, list) or len(child) != shape[-1] for child in values):
            raise InvalidInputError(f"{what}: the arrays nested in 'data' have different lengths")
        if shape[1:]:
            values = [element for child in values for element in child]
    if not all(isinstance(element, str) for element in values):
        raise InvalidInputError(f"{what}: its elements are not all BYTES, which JSON has as strings")
    return _objects([element.encode("utf-8") for element in values]).reshape(shape)


def _bytes_from_raw(raw: memoryview, num_elements: int, what: str) -> Array:
    if num_elements * _LENGTH.size > len(raw):
        raise InvalidInputError(f"{what} is too short for {num_elements} elements of BYTES: it has {len(raw)} bytes")
    elements, offset = [], 0
    for index in range(num_elements):
        if offset + _LENGTH.size > len(raw):
            raise InvalidInputError(f"{what} ends within the length of element {index} of {num_elements}")
        (length,) = _LENGTH.unpack_from(raw, offset)
        offset += _LENGTH.size + length
        if offset > len(raw):
            raise InvalidInputError(f"{what} ends within element {index} of {num_elements}")
        elements.append(bytes(raw[offset - length : offset]))
    if offset != len(raw):
        raise InvalidInputError(f"{what} has {len(raw) - offset} bytes after its {num_elements} elements")
    return _objects(elements)


def _objects(elements: list[bytes]) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def _widened(bits: Array) -> Array:
    """Return bfloat16 bits (uint16, any shape) as float32."""
    widened: Array = bits.astype(np.uint16, copy=False).view(bfloat16).astype(np.float32)
    return widened


def _narrowed(array: Array) -> Array:
    """Return float32 as bfloat16 bits, uint16: nearest, ties to even; a NaN keeps its sign and upper bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrowed: Array = array.astype(bfloat16).view(np.uint16)
    is_nan = np.isnan(array)
    if is_nan.any():  # ml_dtypes makes all of them one
        narrowed[is_nan] = (array[is_nan].view(np.uint32) >> 16) | 0x40
    return narrowed
