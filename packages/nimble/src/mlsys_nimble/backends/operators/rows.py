"""Reductions, softmax, layer norm and gathers (rows.h); batch norm of training where nothing fuses it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mlsys_nimble.backends.cpu import loops
from mlsys_nimble.backends.cpu.library import Kernel, View, load
from mlsys_nimble.backends.cpu.packing import pack_row, pack_table
from mlsys_nimble.backends.reference.pointwise import with_epilogue
from mlsys_nimble.backends.table import FLOAT32, Call, Family, Run, dtype_of, weights_of
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import Operator, ValueId, ValueType
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

FAMILY = Family()


@FAMILY.meaning(kinds.Reduce)
def _reduce(kind: kinds.Reduce, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    functions: dict[str, Any] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}
    function: Callable[..., Tensor] = functions[kind.op]
    dtype = {"dtype": dtype_of(result)} if kind.op == "sum" else {}
    if kind.squares:
        return lambda x: function(x.square(), kind.dims, kind.keeps_dims, **dtype)
    return lambda x: function(x, kind.dims, kind.keeps_dims, **dtype)


@FAMILY.lowering(kinds.Reduce, dtypes=FLOAT32)
def _lower_reduce(call: Call) -> Kernel:
    return reduce(call.kind, call.inputs[0], call.out)


def reduce(kind: kinds.Reduce, x: View, out: View) -> Kernel:
    """Bind a reduction of x, of any strides; the dims that go are ones in ``out``, or not there."""
    kept = [dim for dim in range(len(x.shape)) if dim not in kind.dims]
    if kind.keeps_dims:
        out = out.permuted(kept)
    x_kept, out = loops.merged([x.permuted(kept), out])
    (reduced,) = loops.merged([x.permuted(kind.dims)])
    views = {"x": x_kept, "reduced": reduced, "out": out}
    return Kernel(load(), "reduce", {**views, "op": f"reduce_{kind.op}", "squares": kind.squares})


@FAMILY.meaning(kinds.Softmax)
def _softmax(kind: kinds.Softmax, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    function: Callable[..., Tensor] = torch.log_softmax if kind.is_log else torch.softmax
    return lambda x: function(x, kind.dim)


@FAMILY.lowering(kinds.Softmax, dtypes=FLOAT32)
def _lower_softmax(call: Call) -> Kernel:
    return softmax(call.kind, call.inputs[0], call.out)


def softmax(kind: kinds.Softmax, x: View, out: View) -> Kernel:
    """Bind a softmax; x and out of any strides, they may be the same view."""
    return Kernel(load(), "softmax", _rows(x, out, [kind.dim]) | {"is_log": kind.is_log})


@FAMILY.meaning(kinds.LayerNorm)
def _layer_norm(kind: kinds.LayerNorm, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    shape = result.shape[len(result.shape) - kind.num_dims :]

    def run(x: Tensor, *affine: Tensor) -> Tensor:
        parts = list(affine)
        weight = parts.pop(0) if kind.has_weight else None
        return F.layer_norm(x, shape, weight, parts.pop(0) if kind.has_bias else None, kind.eps)

    return run


@FAMILY.lowering(kinds.LayerNorm, dtypes=FLOAT32, packs=weights_of)
def _lower_layer_norm(call: Call) -> Kernel | None:
    constants = iter(call.weights[1:])
    weight = next(constants) if call.kind.has_weight else None
    bias = next(constants) if call.kind.has_bias else None
    if (call.kind.has_weight and weight is None) or (call.kind.has_bias and bias is None):
        return None
    return layer_norm(call.kind, call.inputs[0], weight, bias, call.out)


def layer_norm(kind: kinds.LayerNorm, x: View, weight: Tensor | None, bias: Tensor | None, out: View) -> Kernel:
    """Bind a layer norm; x and out of any strides, they may be the same view.

    Weight and bias have the shape of the last ``num_dims`` dims.
    """
    rank = len(x.shape)
    scale, shift = (None if row is None else pack_row(row, load().kernel_lanes()) for row in (weight, bias))
    arguments = _rows(x, out, range(rank - kind.num_dims, rank)) | {
        "weight": None if scale is None else scale.data_ptr(),
        "bias": None if shift is None else shift.data_ptr(),
        "eps": kind.eps,
    }
    return Kernel(load(), "layer_norm", arguments, scale, shift)


def _rows(x: View, out: View, dims: Sequence[int]) -> dict[str, Any]:
    """Return the arguments that all row kernels share; ``dims`` make up the rows, in their order."""
    others = [dim for dim in range(len(x.shape)) if dim not in dims]
    x_kept, out_kept = loops.merged([x.permuted(others), out.permuted(others)])
    x_row, out_row = loops.folded([x.permuted(dims), out.permuted(dims)])
    views = {"x": x_kept, "out": out_kept, "x_row": x_row, "out_row": out_row}
    return {**views, "weight": None, "bias": None, "eps": 0.0, "is_log": False}


@FAMILY.meaning(kinds.Embedding)
def _embedding(kind: kinds.Embedding, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda table, indices: F.embedding(indices, table)


def _packed_table(operator: Operator, values: Sequence[ValueType]) -> tuple[ValueId, ...]:
    table = operator.inputs[0]
    return () if values[table].dtype == "float32" else (table,)


@FAMILY.lowering(kinds.Embedding, packs=_packed_table)
def _lower_embedding(call: Call) -> Kernel | None:
    table, indices = call.weights[0], call.inputs[1]
    if table is None or indices.dtype not in ("int64", "int32") or call.out.dtype != "float32":
        return None
    return embedding(table, indices, call.out)


def embedding(table: Tensor, indices: View, out: View) -> Kernel:
    """Bind a look-up: table [V, D], indices [*] int64 or int32, out [*, D], features side by side.

    An index outside of the table sets ``fault``.
    """
    assert indices.dtype in ("int64", "int32"), f"indices of {indices.dtype}"
    rows = pack_table(table)
    fault = ctypes.c_int32(0)
    arguments = {
        "table": rows.data_ptr(),
        "rows": len(rows),
        "width": rows.shape[1],
        "indices": indices,
        "out": out.reshaped(out.shape[:-1], out.strides[:-1]),
        "fault": ctypes.addressof(fault),
    }
    return Kernel(load(), "embedding", arguments, rows, fault=fault)


@FAMILY.meaning(kinds.BatchNormTraining)
def _batch_norm_training(kind: kinds.BatchNormTraining, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    finish = with_epilogue(kind.epilogue, lambda y: y)

    def run(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *residual: Tensor) -> Any:
        normalise = torch.ops.aten._native_batch_norm_legit_functional.default
        y, *statistics = normalise(x, weight, bias, mean, var, True, kind.momentum, kind.eps)
        return (finish(y, *residual), *statistics)

    return run


@FAMILY.meaning(kinds.BatchNormGradient)
def _batch_norm_gradient(kind: kinds.BatchNormGradient, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def run(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        gradient = torch.ops.aten.native_batch_norm_backward.default
        return gradient(dy, x, weight, None, None, mean, rstd, True, 0.0, [True] * 3)

    return run
