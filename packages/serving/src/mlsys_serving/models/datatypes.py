"""Datatypes of the Open Inference Protocol, and their form in models: one row of one table each.

BF16 has no type of numpy's own: a model gets and gives float32, which holds every bfloat16 exactly; its outputs are
rounded to the nearest bfloat16, ties to even. BYTES are object arrays whose elements are ``bytes``.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class DataType(Enum):
    """A datatype by its name in the protocol.

    Example:
        >>> DataType("FP16").dtype, DataType.FP16.itemsize
        (dtype('float16'), 2)
    """

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a model's arrays, in this machine's byte order."""
        return _DTYPES[self]

    @property
    def itemsize(self) -> int | None:
        """Bytes of one element on the wire; None for BYTES, whose elements carry their lengths."""
        return _ITEMSIZES[self]

    @property
    def is_floating(self) -> bool:
        """True if elements may be NaN or infinite."""
        return self in _FLOATING


_DTYPES: dict[DataType, np.dtype[Any]] = {
    DataType.BOOL: np.dtype(np.bool_),
    DataType.UINT8: np.dtype(np.uint8),
    DataType.UINT16: np.dtype(np.uint16),
    DataType.UINT32: np.dtype(np.uint32),
    DataType.UINT64: np.dtype(np.uint64),
    DataType.INT8: np.dtype(np.int8),
    DataType.INT16: np.dtype(np.int16),
    DataType.INT32: np.dtype(np.int32),
    DataType.INT64: np.dtype(np.int64),
    DataType.FP16: np.dtype(np.float16),
    DataType.FP32: np.dtype(np.float32),
    DataType.FP64: np.dtype(np.float64),
    DataType.BF16: np.dtype(np.float32),
    DataType.BYTES: np.dtype(np.object_),
}
_ITEMSIZES = {datatype: dtype.itemsize for datatype, dtype in _DTYPES.items()} | {
    DataType.BF16: 2,
    DataType.BYTES: None,
}
_FLOATING = frozenset({DataType.FP16, DataType.FP32, DataType.FP64, DataType.BF16})
