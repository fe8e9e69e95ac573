"""Views, copies and borders (copy.h); views run in place where strides allow it."""

from __future__ import annotations

import torch
from mlsys_nimble.backends.cpu import loops
from mlsys_nimble.backends.cpu.library import Kernel, View, load
from mlsys_nimble.backends.table import Call, Family, Run, dtype_of
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from mlsys_nimble.ir.sizes import NotGeneral, is_varying
from mlsys_nimble.ir.strides import reshaped
from torch.nn import functional as F  # noqa: N812

FAMILY = Family()


@FAMILY.meaning(kinds.Copy)
def _copy(kind: kinds.Copy, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return torch.clone


@FAMILY.meaning(kinds.Cast)
def _cast(kind: kinds.Cast, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    dtype = dtype_of(result)
    return lambda x: x.to(dtype)


@FAMILY.lowering(kinds.Copy, kinds.Cast)
def _lower_copy(call: Call) -> Kernel:
    return copy(call.inputs[0], call.out)


def copy(x: View, out: View) -> Kernel:
    """Bind a copy from x to out, both of one shape of at most six dims: layouts, casts, expansions (stride 0)."""
    x, out = loops.with_transposed_last(*loops.merged([x, out]))
    return Kernel(load(), "copy", {"x": x, "out": out})


@FAMILY.meaning(kinds.Reshape)
def _reshape(kind: kinds.Reshape, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda x: x.reshape(result.shape)


@FAMILY.lowering(kinds.Reshape)
def _lower_reshape(call: Call) -> Kernel:
    """Copy, with the result viewed in the input's shape, where the layout found no strides for a view."""
    shape = call.inputs[0].shape
    strides = reshaped(call.out.shape, call.out.strides, shape)
    if strides is None and is_varying((call.out.shape, shape)):
        raise NotGeneral("a reshape whose sizes divide one another at some sizes alone")
    assert strides is not None, "the layout gives such a result strides that the input's shape can view"
    return copy(call.inputs[0], call.out.reshaped(shape, strides))


@FAMILY.meaning(kinds.Permute)
def _permute(kind: kinds.Permute, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda x: x.permute(kind.dims)


@FAMILY.meaning(kinds.Slice)
def _slice(kind: kinds.Slice, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    length = result.shape[kind.dim]
    end = kind.start + max(0, (length - 1) * kind.step + 1) if length else kind.start
    part = (slice(None),) * kind.dim + (slice(kind.start, end, kind.step),)
    return lambda x: x[part]


@FAMILY.meaning(kinds.Expand)
def _expand(kind: kinds.Expand, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda x: x.expand(result.shape)


@FAMILY.meaning(kinds.Concat)
def _concat(kind: kinds.Concat, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda *parts: torch.cat(parts, kind.dim)


@FAMILY.meaning(kinds.Pad)
def _pad(kind: kinds.Pad, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    around = [amount for pair in reversed(kind.amounts) for amount in pair]
    return lambda x: F.pad(x, around, value=kind.value)


@FAMILY.lowering(kinds.Pad)
def _lower_pad(call: Call) -> Kernel:
    return pad(call.kind, call.inputs[0], call.out)


def pad(kind: kinds.Pad, x: View, out: View) -> Kernel:
    """Bind a pad: ``kind.value`` around x; one dtype."""
    assert x.dtype == out.dtype, "a border is not a cast"
    dims = sorted(range(len(out.shape)), key=lambda dim: -out.strides[dim])
    before = [kind.amounts[dim][0] for dim in dims]
    arguments = {"x": x.permuted(dims), "out": out.permuted(dims), "before": before, "value": kind.value}
    return Kernel(load(), "pad", arguments)
