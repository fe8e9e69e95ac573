"""Reference backend: the meaning of every kind in torch, and the executor where there is no compiler.

:func:`compile_operator` makes an operator a function of tensors; the native executor runs operators without a kernel
by it. Arithmetic is torch's own, operator by operator, so a captured program gives the model's results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any, TypeAlias

import torch
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from torch.nn import functional as F  # noqa: N812

Tensor: TypeAlias = torch.Tensor
Run: TypeAlias = Callable[..., Any]  # inputs -> the result (a sequence of them, for an operator of several)


class ReferenceExecutor:
    """Executor that replays a program in torch; see :class:`~mlsys_nimble.backends.executor.Executor`."""

    copies: frozenset[ValueId] = frozenset()

    def __init__(self, program: Program, **_: Any) -> None:
        steps = enumerate(program.operators)
        last_use = {value: index for index, operator in steps for value in (*operator.inputs, *operator.outputs)}
        kept = program.kept() | set(program.constants) | set(program.inputs)
        self._program = program
        self._steps = []
        for index, operator in enumerate(program.operators):
            done = tuple({v for v in (*operator.inputs, *operator.outputs) if last_use[v] == index} - kept)
            self._steps.append((compile_operator(operator, program.values), operator.inputs, operator.outputs, done))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`~mlsys_nimble.backends.executor.Executor`."""
        program = self._program
        with torch.no_grad():
            values: dict[ValueId, Tensor] = dict(program.constants)
            values.update(zip(program.inputs, inputs, strict=True))
            for run, arguments, results, done in self._steps:
                made = run(*[values[value] for value in arguments])
                made = [made] if isinstance(made, Tensor) else made
                values.update(zip(results, made, strict=True))
                for value in done:
                    del values[value]
            outputs = [values[value] for value in program.outputs]
            _write_back([(values[old], values[new]) for old, new in program.mutations])
        return outputs


def _write_back(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy each new value to its tensor. All are read before any is written: one may be a view of another's tensor."""
    news = [new if len(pairs) == 1 else new.clone() for _, new in pairs]
    for (old, _), new in zip(pairs, news, strict=True):
        old.copy_(new)


def compile_operator(operator: Operator, values: Sequence[ValueType]) -> Run:
    """Return a function from the operator's input tensors to its result."""
    return _compile(operator.kind, tuple(values[v] for v in operator.inputs), values[operator.outputs[0]])


@singledispatch
def _compile(kind: Any, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    raise AssertionError(f"reference.py gives {kind} no meaning")


def _dtype(type_: ValueType) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, type_.dtype)
    return dtype


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
}


def _with_epilogue(epilogue: kinds.Epilogue, main: Run) -> Run:
    """Return ``main`` followed by the epilogue."""
    if epilogue == kinds.NOTHING:
        return main
    activation = ACTIVATIONS[epilogue.activation] if epilogue.activation else None
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


@_compile.register
def _convolution(kind: kinds.Convolution, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    convolve: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[len(kind.stride) - 1]
    symmetric = all(before == after >= 0 for before, after in kind.padding)
    padding = tuple(before for before, _ in kind.padding) if symmetric else 0
    around = [amount for pair in reversed(kind.padding) for amount in pair]

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x if symmetric else F.pad(x, around)
        return convolve(x, weight, bias, kind.stride, padding, kind.dilation, kind.groups)

    return _with_epilogue(kind.epilogue, run)


@_compile.register
def _separable(kind: kinds.Separable, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    first = _convolution(kind.depthwise, inputs, result)
    second = _convolution(kind.pointwise, inputs, result)
    cut = 1 + kind.depthwise.has_bias

    def run(x: Tensor, *others: Tensor) -> Tensor:
        made: Tensor = second(first(x, *others[:cut]), *others[cut:])
        return made

    return run


@_compile.register
def _linear(kind: kinds.Linear, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return _with_epilogue(kind.epilogue, F.linear)


@_compile.register
def _matmul(kind: kinds.MatMul, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    scale = kind.scale
    return torch.matmul if scale == 1 else lambda a, b: torch.matmul(a, b).mul_(scale)


@_compile.register
def _gemm(kind: kinds.Gemm, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def multiply(a: Tensor, b: Tensor, *bias: Tensor) -> Tensor:
        y = a @ b
        return y + bias[0] if bias else y

    mask = 2 + kind.has_bias
    run = _with_epilogue(kind.epilogue, multiply)
    if not kind.has_mask:
        return run
    return lambda *inputs: run(*inputs[:mask], *inputs[mask + 1 :]).masked_fill(inputs[mask] <= 0, 0.0)


@_compile.register
def _weight_gradient(kind: kinds.WeightGradient, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def run(dy: Tensor, x: Tensor) -> Any:
        rows = dy.reshape(-1, dy.shape[-1])
        weight = rows.t() @ x.reshape(-1, x.shape[-1])
        return (weight, rows.sum(0)) if kind.has_bias else weight

    return run


@_compile.register
def _attention(kind: kinds.Attention, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind.is_causal, scale=kind.scale)

    def attend_by_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1)) * kind.scale
        return torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), v)

    return attend if kind.has_zero_rows else attend_by_softmax


@_compile.register
def _pool(kind: kinds.Pool, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    index = len(kind.kernel) - 1
    around = [amount for pair in reversed(kind.padding) for amount in pair]
    symmetric = all(
        0 <= before == after <= size // 2 for (before, after), size in zip(kind.padding, kind.kernel, strict=True)
    )
    padding = tuple(before for before, _ in kind.padding) if symmetric else 0
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[index]
    average: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[index]
    shares = None
    if kind.op == "average" and not symmetric and not kind.counts_padding:
        ones = torch.ones((1, 1, *inputs[0].shape[2:]), dtype=_dtype(result))
        shares = average(F.pad(ones, around), kind.kernel, kind.stride)  # share of each window that is not padding
    shares_on: dict[torch.device, Tensor] = {}  # by device; filled by its first call, as a capture allows no copy

    def run_max(x: Tensor) -> Tensor:
        x = x if symmetric else F.pad(x, around, value=float("-inf"))
        return pool(x, kind.kernel, kind.stride, padding, kind.dilation)  # type: ignore[no-any-return]

    def run_average(x: Tensor) -> Tensor:
        if symmetric:
            return average(x, kind.kernel, kind.stride, padding, False, kind.counts_padding)  # type: ignore[no-any-return]
        y: Tensor = average(F.pad(x, around), kind.kernel, kind.stride)
        if shares is None:
            return y
        if y.device not in shares_on:
            shares_on[y.device] = shares.to(y.device)
        return y / shares_on[y.device]

    return _with_epilogue(kind.epilogue, run_max if kind.op == "max" else run_average)


@_compile.register
def _reduce(kind: kinds.Reduce, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    functions: dict[str, Any] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}
    function: Callable[..., Tensor] = functions[kind.op]
    dtype = {"dtype": _dtype(result)} if kind.op == "sum" else {}
    return lambda x: function(x, kind.dims, kind.keeps_dims, **dtype)


@_compile.register
def _softmax(kind: kinds.Softmax, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    function: Callable[..., Tensor] = torch.log_softmax if kind.is_log else torch.softmax
    return lambda x: function(x, kind.dim)


@_compile.register
def _layer_norm(kind: kinds.LayerNorm, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    shape = result.shape[len(result.shape) - kind.num_dims :]

    def run(x: Tensor, *affine: Tensor) -> Tensor:
        parts = list(affine)
        weight = parts.pop(0) if kind.has_weight else None
        return F.layer_norm(x, shape, weight, parts.pop(0) if kind.has_bias else None, kind.eps)

    return run


@_compile.register
def _batch_norm_training(kind: kinds.BatchNormTraining, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    finish = _with_epilogue(kind.epilogue, lambda y: y)

    def run(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *residual: Tensor) -> Any:
        normalise = torch.ops.aten._native_batch_norm_legit_functional.default
        y, *statistics = normalise(x, weight, bias, mean, var, True, kind.momentum, kind.eps)
        return (finish(y, *residual), *statistics)

    return run


@_compile.register
def _batch_norm_gradient(kind: kinds.BatchNormGradient, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    def run(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        gradient = torch.ops.aten.native_batch_norm_backward.default
        return gradient(dy, x, weight, None, None, mean, rstd, True, 0.0, [True] * 3)

    return run


@_compile.register
def _reshape(kind: kinds.Reshape, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda x: x.reshape(result.shape)


@_compile.register
def _permute(kind: kinds.Permute, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda x: x.permute(kind.dims)


@_compile.register
def _slice(kind: kinds.Slice, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    length = result.shape[kind.dim]
    end = kind.start + max(0, (length - 1) * kind.step + 1) if length else kind.start
    part = (slice(None),) * kind.dim + (slice(kind.start, end, kind.step),)
    return lambda x: x[part]


@_compile.register
def _expand(kind: kinds.Expand, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda x: x.expand(result.shape)


@_compile.register
def _concat(kind: kinds.Concat, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda *parts: torch.cat(parts, kind.dim)


@_compile.register
def _pad(kind: kinds.Pad, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    around = [amount for pair in reversed(kind.amounts) for amount in pair]
    return lambda x: F.pad(x, around, value=kind.value)


@_compile.register
def _embedding(kind: kinds.Embedding, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return lambda table, indices: F.embedding(indices, table)


@_compile.register
def _cast(kind: kinds.Cast, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    dtype = _dtype(result)
    return lambda x: x.to(dtype)


@_compile.register
def _copy(kind: kinds.Copy, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return torch.clone


@_compile.register
def _pointwise(kind: kinds.Pointwise, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    from mlsys_nimble.backends.reference.pointwise import compile_pointwise

    return compile_pointwise(kind, inputs, result)


@_compile.register
def _aten(kind: kinds.Aten, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    function = aten_function(kind.target)

    def fill(item: Any, tensors: tuple[Tensor, ...]) -> Any:
        if isinstance(item, kinds.Input):
            return tensors[item.index]
        return [fill(part, tensors) for part in item] if isinstance(item, tuple) else item

    def run(*tensors: Tensor) -> Any:
        tensors = as_needed(kind, tensors)
        made = function(*(fill(a, tensors) for a in kind.arguments), **{k: fill(v, tensors) for k, v in kind.keywords})
        return made if isinstance(made, Tensor) else [part for part in made if part is not None]

    return run


def as_needed(kind: kinds.Aten, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs, copying those that must be row-major and are not: torch might misread them silently."""
    if all(tensors[index].is_contiguous() for index in kind.contiguous):
        return tensors
    return tuple([t.contiguous() if index in kind.contiguous else t for index, t in enumerate(tensors)])


def aten_function(target: str) -> Any:
    """Return the overload that a name such as ``"aten.topk.default"`` stands for; custom operators too."""
    function: Any = torch.ops
    for part in target.split("."):
        function = getattr(function, part)
    return function
