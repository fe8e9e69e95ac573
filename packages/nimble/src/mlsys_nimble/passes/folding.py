"""Folding of scales and shifts by constants into the weights beside them, and of borders into padding.

Scales and shifts are batch norms, biases, divisors. Borders around an image and crops of a result join the padding of
the operator between them: nets that pad, convolve with a stride and crop the first row, as NASNet's reductions do, then
compute only what they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mlsys_nimble.ir.operators import NOTHING, Concat, Convolution, Linear, MatMul, Pad, Pointwise, Pool, Slice, Step
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from mlsys_nimble.passes.rewrite import Rewriter


def fold_borders(program: Program) -> Program:
    """Merge slices of a result's space, and constant borders of the input, into convolutions and pools."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        cropped = _cropped(rewriter, operator) if isinstance(operator.kind, Slice) else None
        changed = _padded(rewriter, cropped or operator)
        if changed is not operator:
            rewriter.replace(position, changed)
    return rewriter.build()


def _kernel_of(rewriter: Rewriter, operator: Operator) -> Sequence[int]:
    """Return the window's size per dimension of space."""
    if isinstance(operator.kind, Pool):
        return operator.kind.kernel
    return rewriter.type(operator.inputs[1]).shape[2:]


def _cropped(rewriter: Rewriter, operator: Operator) -> Operator | None:
    """Drop the convolution or pool before a slice, and return it with the padding that gives just the slice."""
    cut = operator.kind
    main = rewriter.sole_producer(operator.inputs[0])
    assert isinstance(cut, Slice)
    if main is None or not isinstance(main.kind, Convolution | Pool) or cut.dim < 2 or cut.step != 1:
        return None
    kind, length = main.kind, rewriter.type(operator.outputs[0]).shape[cut.dim]
    if kind.epilogue.has_residual or length == 0:
        return None
    axis = cut.dim - 2
    size = rewriter.type(main.inputs[0]).shape[cut.dim]
    reach = (length - 1) * kind.stride[axis] + kind.dilation[axis] * (_kernel_of(rewriter, main)[axis] - 1) + 1
    before = kind.padding[axis][0] - cut.start * kind.stride[axis]
    pairs = (*kind.padding[:axis], (before, reach - size - before), *kind.padding[axis + 1 :])
    rewriter.drop(main)
    return replace(main, kind=replace(kind, padding=pairs), outputs=operator.outputs)


def _padded(rewriter: Rewriter, operator: Operator) -> Operator:
    """Return the operator with the border before it merged into its padding, where the result is the same."""
    kind = operator.kind
    border = rewriter.producer(operator.inputs[0]) if isinstance(kind, Convolution | Pool) else None
    if border is None or not isinstance(border.kind, Pad) or not isinstance(kind, Convolution | Pool):
        return operator
    amounts = border.kind.amounts
    if any(map(any, amounts[:2])) or not _may_merge(kind, border.kind):
        return operator
    pairs = tuple((own[0] + added[0], own[1] + added[1]) for own, added in zip(kind.padding, amounts[2:], strict=True))
    return replace(operator, kind=replace(kind, padding=pairs), inputs=(border.inputs[0], *operator.inputs[1:]))


def _may_merge(kind: Convolution | Pool, border: Pad) -> bool:
    """Return whether a border and a padding add up.

    They do if the convolution pads with the border's zeros, or if the padding crops the border, so no window sees it.
    """
    pairs = zip(kind.padding, border.amounts[2:], strict=True)
    sides = [side for own, added in pairs for side in zip(own, added, strict=True)]
    if isinstance(kind, Convolution) and border.value == 0:
        return all(added >= 0 or own <= 0 for own, added in sides)
    return all(added == 0 or 0 < added <= -own for own, added in sides)


_FLOATS = ("float32", "float64")


class Affine(NamedTuple):
    """Scale and shift of ``scale * x + shift``, in float64; both broadcast to x's shape."""

    value: ValueId  # x
    scale: torch.Tensor
    shift: torch.Tensor


def fold_affine(program: Program) -> Program:
    """Fold scales and shifts into the convolution, linear or product before them, through concatenations too.

    Scales and shifts before a convolution or linear fold into it, unless padding would then miss the shift.
    """
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        if isinstance(operator.kind, Pointwise):
            form = _affine_form(rewriter, operator)
            if form is not None:
                _fold_backward(rewriter, position, operator, form)
        elif isinstance(operator.kind, Convolution | Linear):
            while _fold_forward(rewriter, position, operator):
                operator = rewriter.at(position) or operator
    return rewriter.build()


def _affine_form(rewriter: Rewriter, operator: Operator) -> Affine | None:
    """Return the scale and shift that the steps apply to their one computed input; None if they do anything else."""
    kind = operator.kind
    assert isinstance(kind, Pointwise)
    type_ = rewriter.type(operator.outputs[0])
    constants = [rewriter.constant(value) for value in operator.inputs]
    computed = {value for value, constant in zip(operator.inputs, constants, strict=True) if constant is None}
    if len(computed) != 1 or kind.dtype not in _FLOATS or type_.dtype != kind.dtype:
        return None
    x = computed.pop()
    if rewriter.type(x) != type_:
        return None
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    values: list[Any] = [(one, zero) if constant is None else constant.double() for constant in constants]
    results: list[Any] = []
    for step in kind.steps:
        arguments = [
            torch.tensor(a, dtype=torch.float64) if isinstance(a, float) else values[a] if a >= 0 else results[-1 - a]
            for a in step.arguments
        ]
        results.append(_applied(step.op, arguments))
        if results[-1] is None:
            return None
    if not isinstance(results[-1], tuple) or not all(bool(amount.isfinite().all()) for amount in results[-1]):
        return None  # y / 0 is infinite, but infinity folded into weights of both signs gives NaN
    return Affine(x, *results[-1])


def _applied(op: str, arguments: list[Any]) -> Any:
    """Apply one step to numbers and (scale, shift) pairs; None where the result is no such pair."""
    if op == "neg" and isinstance(arguments[0], tuple):
        return -arguments[0][0], -arguments[0][1]
    if op not in ("add", "sub", "mul", "div") or sum(isinstance(a, tuple) for a in arguments) != 1:
        return None
    x, y = arguments
    if isinstance(y, tuple):
        if op == "div":
            return None
        if op == "sub":
            return -y[0], x - y[1]
        x, y = y, x
    if op == "add":
        return x[0], x[1] + y
    if op == "sub":
        return x[0], x[1] - y
    return (x[0] * y, x[1] * y) if op == "mul" else (x[0] / y, x[1] / y)


def _along(amount: torch.Tensor, rank: int, dim: int, size: int) -> torch.Tensor | None:
    """Return one number for every index of ``dim``; None if ``amount`` varies along another dimension."""
    shape = (1,) * (rank - amount.dim()) + tuple(amount.shape)
    if any(n != 1 for index, n in enumerate(shape) if index != dim):
        return None
    return amount.reshape(-1).expand(size)


def _fold_backward(rewriter: Rewriter, position: int, operator: Operator, form: Affine) -> None:
    main = rewriter.sole_producer(form.value)
    if main is None:
        return
    type_ = rewriter.type(form.value)
    if isinstance(main.kind, MatMul):
        if form.scale.numel() == 1 and form.shift.count_nonzero() == 0:
            product = MatMul(main.kind.scale * form.scale.item())
            rewriter.replace(position, replace(operator, kind=product, inputs=main.inputs, name=main.name))
            rewriter.drop(main)
        return
    if isinstance(main.kind, Concat):
        dim = main.kind.dim
    elif _is_foldable(rewriter, main):
        dim = _output_dim(main, type_)
    else:
        return
    scale, shift = (_along(t, len(type_.shape), dim, type_.shape[dim]) for t in form[1:])
    if scale is None or shift is None:
        return
    if isinstance(main.kind, Concat):
        _fold_into_parts(rewriter, position, operator, main, scale, shift)
    else:
        kind, inputs = _scaled_output(rewriter, main, scale, shift)
        rewriter.replace(position, replace(operator, kind=kind, inputs=inputs, name=main.name))
        rewriter.drop(main)


def _output_dim(operator: Operator, type_: ValueType) -> int:
    return len(type_.shape) - 1 if isinstance(operator.kind, Linear) or len(type_.shape) < 2 else 1


def _is_foldable(rewriter: Rewriter, operator: Operator | None) -> bool:
    """Return whether an operator is a convolution or linear whose weights may be changed."""
    if operator is None or not isinstance(operator.kind, Convolution | Linear) or operator.kind.epilogue != NOTHING:
        return False
    return all(rewriter.constant(value) is not None for value in operator.inputs[1:])


def _scaled_output(
    rewriter: Rewriter, main: Operator, scale: torch.Tensor, shift: torch.Tensor
) -> tuple[Convolution | Linear, tuple[ValueId, ...]]:
    """Return kind and inputs that give ``scale * y + shift`` per output channel, where ``main`` gives y."""
    assert isinstance(main.kind, Convolution | Linear)
    weight = rewriter.constant(main.inputs[1])
    scaled = (weight.double() * scale.reshape(-1, *(1,) * (weight.dim() - 1))).to(weight.dtype)
    bias = rewriter.constant(main.inputs[2]).double() * scale + shift if main.kind.has_bias else shift
    constants = (rewriter.add_constant(scaled), rewriter.add_constant(bias.to(weight.dtype).contiguous()))
    return replace(main.kind, has_bias=True), (main.inputs[0], *constants)


def _fold_into_parts(
    rewriter: Rewriter, position: int, operator: Operator, concat: Operator, scale: torch.Tensor, shift: torch.Tensor
) -> None:
    """Rewrite ``affine(concat(parts))`` as ``concat(affine(part), ...)``, if some part folds it into its weights."""
    assert isinstance(concat.kind, Concat)
    dim, producers = concat.kind.dim, [rewriter.sole_producer(part) for part in concat.inputs]
    folds = [
        producer is not None and _is_foldable(rewriter, producer) and _output_dim(producer, rewriter.type(part)) == dim
        for producer, part in zip(producers, concat.inputs, strict=True)
    ]
    if not any(folds) or len(set(concat.inputs)) != len(concat.inputs):
        return
    parts, begin = [], 0
    for index, (part, producer) in enumerate(zip(concat.inputs, producers, strict=True)):
        type_ = rewriter.type(part)
        own = slice(begin, begin + type_.shape[dim])
        begin = own.stop
        if folds[index] and producer is not None:
            kind, inputs = _scaled_output(rewriter, producer, scale[own], shift[own])
            parts.append(rewriter.insert(position, f"{producer.name}.folded", kind, inputs, type_))
            rewriter.drop(producer)
        else:
            parts.append(
                _insert_affine(rewriter, position, f"{operator.name}.{index}", part, dim, scale[own], shift[own])
            )
    rewriter.replace(position, replace(operator, kind=concat.kind, inputs=tuple(parts), name=concat.name))
    rewriter.drop(concat)


def _insert_affine(
    rewriter: Rewriter, position: int, name: str, value: ValueId, dim: int, scale: torch.Tensor, shift: torch.Tensor
) -> ValueId:
    type_ = rewriter.type(value)
    shape = (-1,) + (1,) * (len(type_.shape) - 1 - dim)
    dtype = getattr(torch, type_.dtype)
    constants = [rewriter.add_constant(amount.to(dtype).reshape(shape).contiguous()) for amount in (scale, shift)]
    steps = (Step("mul", (0, 1)), Step("add", (-1, 2)))
    return rewriter.insert(position, name, Pointwise(steps, type_.dtype), (value, *constants), type_)


def _fold_forward(rewriter: Rewriter, position: int, operator: Operator) -> bool:
    """Rewrite ``conv(scale * x + shift)`` as another convolution of x; return whether it was possible."""
    kind = operator.kind
    assert isinstance(kind, Convolution | Linear)
    before = rewriter.sole_producer(operator.inputs[0])
    num_constants = 1 + kind.has_bias
    constants = [rewriter.constant(value) for value in operator.inputs[1 : 1 + num_constants]]
    if before is None or not isinstance(before.kind, Pointwise) or any(constant is None for constant in constants):
        return False
    form = _affine_form(rewriter, before)
    if form is None:
        return False
    type_ = rewriter.type(operator.inputs[0])
    dim = _output_dim(operator, type_)
    scale, shift = (_along(t, len(type_.shape), dim, type_.shape[dim]) for t in form[1:])
    if scale is None or shift is None:
        return False
    if isinstance(kind, Convolution) and any(map(any, kind.padding)) and shift.count_nonzero():
        return False
    weight = constants[0]
    groups = kind.groups if isinstance(kind, Convolution) else 1

    def per_weight(amount: torch.Tensor) -> torch.Tensor:
        """Reshape [C] to [O, C/groups, 1, ...]: for each output the input channels of its group."""
        by_group = amount.reshape(groups, 1, -1).expand(groups, weight.shape[0] // groups, -1)
        return by_group.reshape(weight.shape[0], -1, *(1,) * (weight.dim() - 2))

    scaled = (weight.double() * per_weight(scale)).to(weight.dtype)
    added = (weight.double() * per_weight(shift)).flatten(1).sum(1)
    bias = added + constants[1].double() if kind.has_bias else added
    inputs = (form.value, rewriter.add_constant(scaled), rewriter.add_constant(bias.to(weight.dtype)))
    rest = operator.inputs[1 + num_constants :]
    rewriter.replace(position, replace(operator, kind=replace(kind, has_bias=True), inputs=inputs + rest))
    rewriter.drop(before)
    return True
