"""Rows of an embedding's table, which may be in codes."""

from __future__ import annotations

from ctypes import byref

import torch
from mlsys_core.native import new
from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.library import address
from mlsys_orca.model.layers import look_up
from mlsys_orca.model.weights.quantized import Matrix, QuantizedMatrix
from torch import Tensor


def look_up_native(table: Matrix, ids: Tensor) -> Tensor:
    """Return rows of a table like :func:`~mlsys_orca.model.layers.look_up`; a table in codes takes one native call.

    Raises:
        IndexError: there is no such row.
    """
    if not isinstance(table, QuantizedMatrix):
        return look_up(table, ids)
    parts = {name: None if part is None else part.contiguous() for name, part in table.parts.items()}
    native = library.load()
    matrix = new(
        native.structs["Codes"],
        **{name: address(part) for name, part in parts.items()},
        rows=table.out_features,
        K=table.in_features,
        group_size=table.group_size,
        block_size=table.block_size or 0,
        bits=table.bits,
        has_halves=table.scales.dtype == torch.float16,
    )
    ids = ids.contiguous()
    found = torch.empty(len(ids), table.in_features)
    count = native.orca_look_up(byref(matrix), ids.data_ptr(), len(ids), found.data_ptr())
    if count < len(ids):
        raise IndexError(f"there is no token {ids[count]}: the embedding has {table.out_features} rows")
    return found
