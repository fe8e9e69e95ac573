"""Rows taken and added to by computed indices (indexing.h)."""

from __future__ import annotations

import ctypes
from math import prod

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


def gather(kind: kinds.Gather, x: View, indices: View, out: View) -> Kernel:
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
    return Kernel(load(), "gather", arguments, fault=fault)


@FAMILY.meaning(kinds.ScatterAdd)
def _scatter_add(kind: kinds.ScatterAdd, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    taken = None if kind.taken is None else _gather(kind.taken, inputs[2:4], inputs[3])

    def run(x: Tensor, indices: Tensor, source: Tensor, *rest: Tensor) -> Tensor:
        if taken is not None:
            source = taken(source, rest[0])
        return torch.index_add(x, 0, indices, source * rest[-1] if kind.has_scale else source)

    return run


@FAMILY.lowering(kinds.ScatterAdd)
def _lower_scatter_add(call: Call) -> Kernel | None:
    x, indices, source, *rest = call.inputs
    numbers = [x, source, call.out, *(rest[-1:] if call.kind.has_scale else ())]
    if indices.dtype not in _INDICES or {view.dtype for view in numbers} != {"float32"}:
        return None
    has_rows = all(_has_rows(view, 1) for view in (x, source, call.out))
    return scatter_add(call.kind, x, indices, source, call.out, *rest) if has_rows else None


def scatter_add(kind: kinds.ScatterAdd, x: View, indices: View, source: View, out: View, *rest: View) -> Kernel:
    """Bind out = x, with rows of source added at indices [E] in order, float32; out may be x.

    ``rest`` are the indices of the rows and their factors, as ``kind`` has them. An index outside of x or of the
    source sets ``fault``.
    """
    fault = ctypes.c_int32(0)
    scale = rest[-1].reshaped(indices.shape, rest[-1].strides[:1]) if kind.has_scale else None
    arguments = {
        "x": _rows(x),
        "source": _rows(source),
        "out": _rows(out),
        "indices": indices,
        "taken": None if kind.taken is None else rest[0],
        "scale": scale,
        "wraps": kind.taken is not None and kind.taken.wraps,
        "fault": ctypes.addressof(fault),
    }
    return Kernel(load(), "scatter_add", arguments, fault=fault)


def _has_rows(view: View, dim: int) -> bool:
    """Return whether the dims from ``dim`` on lie side by side."""
    shape = view.shape[dim:]
    wanted = dense(shape, row_major(len(shape)))
    return all(size == 1 or step == own for size, step, own in zip(shape, view.strides[dim:], wanted, strict=True))


def _rows(view: View) -> View:
    return view.reshaped((view.shape[0], prod(view.shape[1:])), (view.strides[0], 1))
