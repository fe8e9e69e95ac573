"""From operators to kernels: what each kind needs bound, and which operators have no kernel.

One function a kind; an operator without a kernel for its dtypes or shapes runs in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from mlsys_nimble import operators as kinds
from mlsys_nimble.native import kernels
from mlsys_nimble.native.library import DTYPES, MAX_RANK, Kernel, View
from mlsys_nimble.program import Operator, ValueId
from mlsys_nimble.strides import dense, row_major

Views: TypeAlias = Sequence[View]
Weights: TypeAlias = Sequence[Tensor | None]  # per input: the constant, if it is one


def kernel_for(operator: Operator, views: Mapping[ValueId, View], constants: Mapping[ValueId, Tensor]) -> Kernel | None:
    """The operator's kernel with everything bound; None: it has none.

    Args:
        operator: Any, but those that the layout has in place.
        views: Where its inputs and outputs lie.
        constants: Tensors that never change, which kernels may pack.
    """
    lower = _RULES.get(type(operator.kind))
    inputs = [views[value] for value in operator.inputs]
    out = views[operator.outputs[0]]
    if lower is None or any(view.dtype not in DTYPES or len(view.shape) > MAX_RANK for view in (*inputs, out)):
        return None
    exact = {"float32", "bool", "int32", "uint8"} if isinstance(operator.kind, kinds.Pointwise) else {"float32"}
    if isinstance(operator.kind, _EXACT_ONLY) and any(view.dtype not in exact for view in (*inputs, out)):
        return None
    return lower(operator.kind, inputs, [constants.get(value) for value in operator.inputs], out)


def _convolution(kind: kinds.Convolution, inputs: Views, weights: Weights, out: View) -> Kernel | None:
    weight, bias = weights[1], weights[2] if kind.has_bias else None
    if weight is None or (kind.has_bias and bias is None) or len(out.shape) > kernels.SPACE + 2:
        return None
    residual = inputs[-1] if kind.epilogue.has_residual else None
    if kernels.is_depthwise(kind, weight):
        return kernels.depthwise(kind, inputs[0], weight, bias, out, residual=residual)
    return kernels.convolution(kind, inputs[0], weight, bias, out, residual=residual)


def _linear(kind: kinds.Linear, inputs: Views, weights: Weights, out: View) -> Kernel | None:
    weight, bias = weights[1], weights[2] if kind.has_bias else None
    if weight is None or (kind.has_bias and bias is None):
        return None
    residual = _rows(inputs[-1]) if kind.epilogue.has_residual else None
    return kernels.linear(kind, _rows(inputs[0]), weight, bias, _rows(out), residual=residual)


def _rows(view: View) -> View:
    """[*, K] as [rows, K]; the layout has seen to it that rows are at one distance."""
    rows = 1
    for size in view.shape[:-1]:
        rows *= size
    lead = [stride for size, stride in zip(view.shape[:-1], view.strides[:-1], strict=True) if size != 1]
    return view.reshaped((rows, view.shape[-1]), (lead[-1] if lead else view.shape[-1], view.strides[-1]))


def _copy(kind: object, inputs: Views, weights: Weights, out: View) -> Kernel:
    return kernels.copy(inputs[0], out)


def _reshape(kind: kinds.Reshape, inputs: Views, weights: Weights, out: View) -> Kernel:
    """Only where the layout found no strides: the result lies row by row, so its elements can be told as the input's."""
    shape = inputs[0].shape
    return kernels.copy(inputs[0], out.reshaped(shape, dense(shape, row_major(len(shape)))))


def _pad(kind: kinds.Pad, inputs: Views, weights: Weights, out: View) -> Kernel:
    return kernels.pad(kind, inputs[0], out)


def _pointwise(kind: kinds.Pointwise, inputs: Views, weights: Weights, out: View) -> Kernel:
    return kernels.pointwise(kind, inputs, out)


_EXACT_ONLY = (  # computed in single precision
    *(kinds.Convolution, kinds.Linear, kinds.MatMul, kinds.Attention, kinds.Pool, kinds.Reduce),
    *(kinds.Softmax, kinds.LayerNorm, kinds.Pointwise),
)
_RULES: dict[type, Callable[[Any, Views, Weights, View], Kernel | None]] = {
    kinds.Convolution: _convolution,
    kinds.Linear: _linear,
    kinds.Copy: _copy,
    kinds.Cast: _copy,
    kinds.Reshape: _reshape,
    kinds.Pad: _pad,
    kinds.Pointwise: _pointwise,
}
