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
    if isinstance(operator.kind, _FLOATS_ONLY) and any(view.dtype != "float32" for view in (*inputs, out)):
        return None
    return lower(operator.kind, inputs, [constants.get(value) for value in operator.inputs], out)


def _convolution(kind: kinds.Convolution, inputs: Views, weights: Weights, out: View) -> Kernel | None:
    weight, bias = weights[1], weights[2] if kind.has_bias else None
    if weight is None or (kind.has_bias and bias is None) or len(out.shape) > kernels.SPACE + 2:
        return None
    residual = inputs[-1] if kind.epilogue.has_residual else None
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


_FLOATS_ONLY = (
    *(kinds.Convolution, kinds.Linear, kinds.MatMul, kinds.Attention, kinds.Pointwise, kinds.Pool, kinds.Reduce),
    *(kinds.Softmax, kinds.LayerNorm, kinds.Pad),
)
_RULES: dict[type, Callable[[Any, Views, Weights, View], Kernel | None]] = {
    kinds.Convolution: _convolution,
    kinds.Linear: _linear,
}
