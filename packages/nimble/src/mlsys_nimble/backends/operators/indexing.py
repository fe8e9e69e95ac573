"""Rows taken and added to by computed indices (indexing.h)."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import torch
from mlsys_nimble.backends.cpu.library import Kernel, View, load
from mlsys_nimble.backends.table import Call, Family, Run
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from mlsys_nimble.ir.strides import dense, row_major
from torch import Tensor

FAMILY = Family()
_INDICES = ("int64", "int32")


@FAMILY.meaning(kinds.Gather)
def _gather(kind: kinds.Gather, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def run(x: Tensor, indices: Tensor) -> Tensor:
        return x[indices] if kind.wraps else x.index_select(0, indices.reshape(-1)).reshape(result.shape)

    return run


@FAMILY.lowering(kinds.Gather)
def _lower_gather(call: Call) -> Kernel | None:
    x, indices = call.inputs
    if indices.dtype not in _INDICES or not (_has_rows(x, 1) and _has_rows(call.out, len(indices.shape))):
        return None
    return gather(call.kind, x, indices, call.out)


def gather(kind: kinds.Gather, x: View, indices: View, out: View, *, library: Any = None) -> Kernel:
    """Bind a gather of rows of x [N, *row] by indices [*] to out [*, *row]; elements of a row lie side by side.

    An index outside of x sets ``fault``.
    """
    fault = ctypes.c_int32(0)
    rank = len(indices.shape)
    arguments = {
        "x": _rows(x),
        "indices": indices,
        "out": out.reshaped(out.shape[:rank], out.strides[:rank]),
        "wraps": kind.wraps,
        "fault": ctypes.addressof(fault),
    }
    return Kernel(library or load(), "gather", arguments, fault=fault)


@FAMILY.meaning(kinds.ScatterAdd)
def _scatter_add(kind: kinds.ScatterAdd, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda x, indices, source: torch.index_add(x, 0, indices, source)


@FAMILY.lowering(kinds.ScatterAdd)
def _lower_scatter_add(call: Call) -> Kernel | None:
    x, indices, source = call.inputs
    if indices.dtype not in _INDICES or {x.dtype, source.dtype, call.out.dtype} != {"float32"}:
        return None
    return scatter_add(x, indices, source, call.out) if all(_has_rows(v, 1) for v in (x, source, call.out)) else None


def scatter_add(x: View, indices: View, source: View, out: View, *, library: Any = None) -> Kernel:
    """Bind out = x, with rows of source [E, *row] added at indices [E] in order, float32; out may be x.

    An index outside of x sets ``fault``.
    """
    fault = ctypes.c_int32(0)
    views = {"x": _rows(x), "source": _rows(source), "out": _rows(out), "indices": indices}
    return Kernel(library or load(), "scatter_add", {**views, "fault": ctypes.addressof(fault)}, fault=fault)


def _has_rows(view: View, dim: int) -> bool:
    """Return whether the dims from ``dim`` on lie side by side."""
    shape = view.shape[dim:]
    wanted = dense(shape, row_major(len(shape)))
    return all(size == 1 or step == own for size, step, own in zip(shape, view.strides[dim:], wanted, strict=True))


def _rows(view: View) -> View:
    return view.reshaped((view.shape[0], prod(view.shape[1:])), (view.strides[0], 1))
