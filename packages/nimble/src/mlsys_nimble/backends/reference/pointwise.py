"""Meaning in torch of the steps of a Pointwise, and of epilogues: what a kind applies to its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

_Function: TypeAlias = Callable[..., Tensor]

FUNCTIONS: dict[str, _Function] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("add", "sub", "mul", "div", "maximum", "minimum", "pow"),
            *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "erf", "sin", "cos"),
            *("floor", "ceil", "round", "trunc", "sign", "relu", "sigmoid", "tanh"),
            *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
        )
    },
    **{name: getattr(F, name) for name in ("relu6", "silu", "gelu", "hardswish", "hardsigmoid")},
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky_relu": lambda x, slope: F.leaky_relu(x, float(slope)),
    "elu": lambda x, alpha: F.elu(x, float(alpha)),
    "where": lambda condition, x, y: torch.where(condition != 0, x, y),
    "clamp": lambda x, low, high: torch.clamp(x, low.item(), high.item()),
}
_TAKE_NUMBERS = ("mul", "div", "pow", "leaky_relu", "elu")  # torch does not round their number to the tensor's dtype


def compile_pointwise(kind: kinds.Pointwise, inputs: tuple[ValueType, ...], result: ValueType) -> Callable[..., Tensor]:
    """Return a function from the input tensors to the result that computes the steps in order."""
    dtype: torch.dtype = getattr(torch, kind.dtype)
    result_dtype: torch.dtype = getattr(torch, result.dtype)
    num_inputs = len(inputs)
    first_step = num_inputs + sum(isinstance(a, float) for step in kind.steps for a in step.arguments)
    constants: list[Tensor | float] = []
    program: list[tuple[_Function, tuple[int, ...]]] = []  # indices: inputs, constants, results of steps
    for step in kind.steps:
        indices = []
        for argument in step.arguments:
            if isinstance(argument, float):
                indices.append(num_inputs + len(constants))
                is_exact = step.op in _TAKE_NUMBERS and dtype.is_floating_point and argument is step.arguments[-1]
                constants.append(argument if is_exact else torch.tensor(argument, dtype=torch.float64).to(dtype))
            else:
                indices.append(argument if argument >= 0 else first_step - 1 - argument)
        program.append((FUNCTIONS[step.op], tuple(indices)))

    def run(*tensors: Tensor) -> Tensor:
        values: list[Any] = [tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor in tensors]
        values += constants
        for function, indices in program:
            made: Any = function(*[values[index] for index in indices])
            values.append(made if made.dtype == dtype else made.to(dtype))
        y: Tensor = values[-1]
        y = y if y.dtype == result_dtype else y.to(result_dtype)
        return y if y.shape == result.shape else y.expand(result.shape).contiguous()

    return run


def with_epilogue(epilogue: kinds.Epilogue, main: Run) -> Run:
    """Return ``main`` followed by the epilogue."""
    if epilogue == kinds.NOTHING:
        return main
    activation = FUNCTIONS[epilogue.activation] if epilogue.activation else None
    extra = (epilogue.slope,) if epilogue.activation in ("leaky_relu", "elu") else ()

    def run(*inputs: Tensor) -> Tensor:
        residual = None
        if epilogue.has_residual:
            *rest, residual = inputs
            inputs = tuple(rest)
        y: Tensor = main(*inputs)
        if residual is not None and not epilogue.activates_first:
            y = y + residual
        y = activation(y, *extra) if activation else y
        return y + residual if residual is not None and epilogue.activates_first else y

    return run
