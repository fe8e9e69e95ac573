"""Lowering of operators to kernels: one function a kind, which binds its tensors.

An operator without a kernel for its dtypes or shapes runs in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlsys_nimble.backends.cpu import convolutions, kernels
from mlsys_nimble.backends.cpu.library import DTYPES, MAX_RANK, SPACE, Kernel, View, load_bf16
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import Operator, ValueId, ValueType
from mlsys_nimble.ir.strides import reshaped
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Call:
    kind: Any
    inputs: Sequence[View]
    weights: Sequence[Tensor | None]  # by input; None for those that are not constants
    out: View
    library: Any = None  # None: the default library


def kernel_for(operator: Operator, views: Mapping[ValueId, View], constants: Mapping[ValueId, Tensor]) -> Kernel | None:
    """Bind the operator's usual kernel; return None if it has none.

    Args:
        operator: Operator that the layout does not run in place.
        views: Memory of its inputs and outputs.
        constants: Tensors that never change, so that kernels may pack them.
    """
    call = _Call(
        operator.kind,
        [views[value] for value in operator.inputs],
        [constants.get(value) for value in operator.inputs],
        views[operator.outputs[0]],
    )
    lower = _RULES.get(type(operator.kind))
    every = (*call.inputs, call.out)
    if lower is None or any(view.dtype not in DTYPES or len(view.shape) > MAX_RANK for view in every):
        return None
    if any(0 in view.shape for view in every):
        return None
    exact = {"float32", "bool", "int32", "uint8"} if isinstance(operator.kind, kinds.Pointwise) else {"float32"}
    if isinstance(operator.kind, _EXACT_ONLY) and any(view.dtype not in exact for view in every):
        return None
    if isinstance(operator.kind, kinds.Pointwise) and not _is_exact(operator.kind):
        return None
    return lower(call)


def _is_exact(kind: kinds.Pointwise) -> bool:
    """Return whether the kernel, which computes integers in double, equals arithmetic that wraps around."""
    if kind.dtype in ("float32", "bool"):
        return True
    return all(step.op in _NEVER_WRAP for step in kind.steps)


def other_kernels(
    operator: Operator, views: Mapping[ValueId, View], constants: Mapping[ValueId, Tensor], *, winograd: int
) -> dict[str, Callable[[], Kernel]]:
    """Return kernels that may be faster than the usual one, by name, for the paper's kernel selection (section 3.3).

    The operator must have a kernel by :func:`kernel_for`. ``winograd`` is the largest tile allowed.
    """
    kind, weight = operator.kind, constants.get(operator.inputs[1]) if len(operator.inputs) > 1 else None
    if not isinstance(kind, kinds.Convolution | kinds.Linear) or weight is None:
        return {}
    inputs, out = [views[value] for value in operator.inputs], views[operator.outputs[0]]
    bias = constants[operator.inputs[2]] if kind.has_bias else None
    residual = inputs[-1] if kind.epilogue.has_residual else None
    found: dict[str, Callable[[], Kernel]] = {}
    if _is_bf16(weight):
        call = _Call(kind, inputs, [constants.get(value) for value in operator.inputs], out, load_bf16())
        found["bf16 weights"] = lambda: _made(_RULES[type(kind)](call))
    if isinstance(kind, kinds.Convolution) and convolutions.is_winograd(kind, weight):

        def by_tiles(size: Literal[2, 4]) -> Kernel:
            return convolutions.winograd(kind, inputs[0], weight, bias, out, size=size, residual=residual)

        tiles: dict[int, Callable[[], Kernel]] = {2: lambda: by_tiles(2), 4: lambda: by_tiles(4)}
        found |= {f"winograd {size}": make for size, make in tiles.items() if size <= winograd}
    return found


def packed_inputs(operator: Operator, values: Sequence[ValueType]) -> tuple[ValueId, ...]:
    """Return the inputs that an operator's kernel packs if they are constants."""
    if isinstance(operator.kind, kinds.Embedding):
        table = operator.inputs[0]
        return () if values[table].dtype == "float32" else (table,)
    return operator.inputs[1:] if isinstance(operator.kind, _PACKS) else ()


def _is_bf16(weight: Tensor) -> bool:
    """Return whether bf16 holds a weight exactly; False for depthwise convolutions, whose weights are small."""
    return weight.shape[1] > 1 and bool((weight.bfloat16() == weight).all())


def _made(kernel: Kernel | None) -> Kernel:
    assert kernel is not None, "no kernel with other weights where there is one with the usual"
    return kernel


def _convolution(call: _Call) -> Kernel | None:
    weight, bias = call.weights[1], call.weights[2] if call.kind.has_bias else None
    if weight is None or (call.kind.has_bias and bias is None) or len(call.out.shape) > SPACE + 2:
        return None
    residual = call.inputs[-1] if call.kind.epilogue.has_residual else None
    if convolutions.is_depthwise(call.kind, weight):
        return convolutions.depthwise(call.kind, call.inputs[0], weight, bias, call.out, residual=residual)
    return convolutions.convolution(
        call.kind, call.inputs[0], weight, bias, call.out, residual=residual, library=call.library
    )


def _separable(call: _Call) -> Kernel:
    constants = iter(call.weights[1:])
    weights, biases = [], []
    for kind in (call.kind.depthwise, call.kind.pointwise):
        weights.append(_known(next(constants)))
        biases.append(next(constants) if kind.has_bias else None)
    residual = call.inputs[-1] if call.kind.epilogue.has_residual else None
    return convolutions.separable(call.kind, call.inputs[0], weights, biases, call.out, residual=residual)


def _known(constant: Tensor | None) -> Tensor:
    assert constant is not None, "fuse_separables takes constants only"
    return constant


def _linear(call: _Call) -> Kernel | None:
    weight, bias = call.weights[1], call.weights[2] if call.kind.has_bias else None
    if weight is None or (call.kind.has_bias and bias is None):
        return None
    residual = _rows(call.inputs[-1]) if call.kind.epilogue.has_residual else None
    return convolutions.linear(
        call.kind, _rows(call.inputs[0]), weight, bias, _rows(call.out), residual=residual, library=call.library
    )


def _copy(call: _Call) -> Kernel:
    return kernels.copy(call.inputs[0], call.out)


def _reshape(call: _Call) -> Kernel:
    """Copy, with the result viewed in the input's shape, where the layout found no strides for a view."""
    shape = call.inputs[0].shape
    strides = reshaped(call.out.shape, call.out.strides, shape)
    assert strides is not None, "the layout gives such a result strides that the input's shape can view"
    return kernels.copy(call.inputs[0], call.out.reshaped(shape, strides))


def _pad(call: _Call) -> Kernel:
    return kernels.pad(call.kind, call.inputs[0], call.out)


def _pointwise(call: _Call) -> Kernel:
    return kernels.pointwise(call.kind, call.inputs, call.out)


def _pool(call: _Call) -> Kernel | None:
    if len(call.out.shape) > SPACE + 2:
        return None
    return kernels.pool(
        call.kind, call.inputs[0], call.out, residual=call.inputs[-1] if call.kind.epilogue.has_residual else None
    )


def _reduce(call: _Call) -> Kernel:
    return kernels.reduce(call.kind, call.inputs[0], call.out)


def _softmax(call: _Call) -> Kernel:
    return kernels.softmax(call.kind, call.inputs[0], call.out)


def _layer_norm(call: _Call) -> Kernel | None:
    constants = iter(call.weights[1:])
    weight = next(constants) if call.kind.has_weight else None
    bias = next(constants) if call.kind.has_bias else None
    if (call.kind.has_weight and weight is None) or (call.kind.has_bias and bias is None):
        return None
    return kernels.layer_norm(call.kind, call.inputs[0], weight, bias, call.out)


def _matmul(call: _Call) -> Kernel | None:
    if len(call.out.shape) > 4:
        return None
    return kernels.matmul(call.kind, call.inputs[0], call.inputs[1], call.out)


def _attention(call: _Call) -> Kernel:
    q, k, v, *mask = call.inputs
    return kernels.attention(call.kind, q, k, v, call.out, mask=mask[0] if mask else None)


def _embedding(call: _Call) -> Kernel | None:
    table, indices = call.weights[0], call.inputs[1]
    if table is None or indices.dtype not in ("int64", "int32") or call.out.dtype != "float32":
        return None
    return kernels.embedding(table, indices, call.out)


def _rows(view: View) -> View:
    """View [*, K] as [rows, K]; the layout ensures that rows are equally far apart."""
    rows = 1
    for size in view.shape[:-1]:
        rows *= size
    lead = [stride for size, stride in zip(view.shape[:-1], view.strides[:-1], strict=True) if size != 1]
    return view.reshaped((rows, view.shape[-1]), (lead[-1] if lead else view.shape[-1], view.strides[-1]))


_NEVER_WRAP = frozenset(
    {
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
        *("where", "maximum", "minimum", "relu", "sign"),
    }
)
_EXACT_ONLY = (  # computed in single precision
    *(kinds.Convolution, kinds.Separable, kinds.Linear, kinds.MatMul, kinds.Attention, kinds.Pool, kinds.Reduce),
    *(kinds.Softmax, kinds.LayerNorm, kinds.Pointwise),
)
_PACKS = (kinds.Convolution, kinds.Separable, kinds.Linear, kinds.LayerNorm)
_RULES: dict[type, Callable[[_Call], Kernel | None]] = {
    kinds.Convolution: _convolution,
    kinds.Separable: _separable,
    kinds.Linear: _linear,
    kinds.Copy: _copy,
    kinds.Cast: _copy,
    kinds.Reshape: _reshape,
    kinds.Pad: _pad,
    kinds.Pointwise: _pointwise,
    kinds.Pool: _pool,
    kinds.Reduce: _reduce,
    kinds.Softmax: _softmax,
    kinds.LayerNorm: _layer_norm,
    kinds.MatMul: _matmul,
    kinds.Attention: _attention,
    kinds.Embedding: _embedding,
}
