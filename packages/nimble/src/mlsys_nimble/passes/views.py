"""Simplification of operators that only move elements: chains of views, needless copies, slices of concatenations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mlsys_nimble.capture.builder import broadcast
from mlsys_nimble.ir.operators import Cast, Concat, Copy, Expand, Pad, Permute, Pointwise, Reduce, Reshape, Slice
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.passes.rewrite import Rewriter


def simplify_views(program: Program) -> Program:
    """Merge views of views, drop those that change nothing, and read slices of concatenations from their parts."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        rule = _RULES.get(type(operator.kind))
        if isinstance(operator.kind, Copy):
            if operator.outputs[0] not in rewriter.lasting:
                rewriter.substitute(operator, operator.inputs[0])
        elif rule is not None:
            rule(rewriter, position, operator)
    return rewriter.build()


def _is_unchanged(rewriter: Rewriter, operator: Operator) -> bool:
    return rewriter.type(operator.inputs[0]) == rewriter.type(operator.outputs[0])


def _merge(rewriter: Rewriter, position: int, operator: Operator, kind: Any, value: ValueId) -> None:
    rewriter.replace(position, replace(operator, kind=kind, inputs=(value,)))


def _reshape(rewriter: Rewriter, position: int, operator: Operator) -> None:
    if _is_unchanged(rewriter, operator):
        return rewriter.substitute(operator, operator.inputs[0])
    inner = rewriter.producer(operator.inputs[0])
    if inner is None:
        return None
    if isinstance(inner.kind, Reshape):
        if rewriter.type(inner.inputs[0]) == rewriter.type(operator.outputs[0]):
            return rewriter.substitute(operator, inner.inputs[0])
        return _merge(rewriter, position, operator, Reshape(), inner.inputs[0])
    if isinstance(inner.kind, Reduce) and inner.kind.keeps_dims and rewriter.sole_producer(operator.inputs[0]):
        shape = rewriter.type(inner.inputs[0]).shape
        rest = tuple(size for dim, size in enumerate(shape) if dim not in inner.kind.dims)
        if rest == rewriter.type(operator.outputs[0]).shape:  # a pool of whole images, flattened
            _merge(rewriter, position, operator, replace(inner.kind, keeps_dims=False), inner.inputs[0])
            rewriter.drop(inner)
    return None


def _permute(rewriter: Rewriter, position: int, operator: Operator) -> None:
    dims = operator.kind.dims  # type: ignore[union-attr]
    inner = rewriter.producer(operator.inputs[0])
    value = operator.inputs[0]
    if inner is not None and isinstance(inner.kind, Permute):
        dims, value = tuple(inner.kind.dims[dim] for dim in dims), inner.inputs[0]
    if dims == tuple(range(len(dims))):
        rewriter.substitute(operator, value)
    elif value != operator.inputs[0]:
        _merge(rewriter, position, operator, Permute(dims), value)


def _slice(rewriter: Rewriter, position: int, operator: Operator) -> None:
    kind = operator.kind
    assert isinstance(kind, Slice)
    if kind.start == 0 and kind.step == 1 and _is_unchanged(rewriter, operator):
        return rewriter.substitute(operator, operator.inputs[0])
    inner = rewriter.producer(operator.inputs[0])
    if inner is None:
        return None
    if isinstance(inner.kind, Slice) and inner.kind.dim == kind.dim:
        merged = Slice(kind.dim, inner.kind.start + kind.start * inner.kind.step, kind.step * inner.kind.step)
        return _merge(rewriter, position, operator, merged, inner.inputs[0])
    is_part = isinstance(inner.kind, Concat) and inner.kind.dim == kind.dim
    if is_part and operator.outputs[0] not in rewriter.lasting:
        length = rewriter.type(operator.outputs[0]).shape[kind.dim]
        end, begin = kind.start + (length - 1) * kind.step + 1, 0
        for part in inner.inputs:
            size = rewriter.type(part).shape[kind.dim]
            if length and begin <= kind.start and end <= begin + size:
                if kind.step == 1 and size == length:
                    return rewriter.substitute(operator, part)
                return _merge(rewriter, position, operator, replace(kind, start=kind.start - begin), part)
            begin += size
    return None


def _expand(rewriter: Rewriter, position: int, operator: Operator) -> None:
    if _is_unchanged(rewriter, operator):
        return rewriter.substitute(operator, operator.inputs[0])
    inner = rewriter.producer(operator.inputs[0])
    if inner is not None and isinstance(inner.kind, Expand):
        return _merge(rewriter, position, operator, Expand(), inner.inputs[0])
    return None


def _pass_through(rewriter: Rewriter, position: int, operator: Operator) -> None:
    """Drop an operator that only moves its input; where the caller gets the result, make it a copy."""
    if operator.outputs[0] in rewriter.lasting:
        rewriter.replace(position, replace(operator, kind=Copy()))
    else:
        rewriter.substitute(operator, operator.inputs[0])


def _drop_unchanged(rewriter: Rewriter, position: int, operator: Operator) -> None:
    is_nothing = not isinstance(operator.kind, Pad) or not any(map(any, operator.kind.amounts))
    if is_nothing and _is_unchanged(rewriter, operator):
        _pass_through(rewriter, position, operator)


def _concat(rewriter: Rewriter, position: int, operator: Operator) -> None:
    kind = operator.kind
    assert isinstance(kind, Concat)
    if len(operator.inputs) == 1:
        return _pass_through(rewriter, position, operator)
    parts: list[ValueId] = []
    for value in operator.inputs:
        if rewriter.type(value).shape[kind.dim] == 0:
            continue
        inner = rewriter.sole_producer(value) if operator.inputs.count(value) == 1 else None
        if inner is not None and isinstance(inner.kind, Concat) and inner.kind.dim == kind.dim:
            parts += inner.inputs
        else:
            parts.append(value)
    if parts and tuple(parts) != operator.inputs:
        rewriter.replace(position, replace(operator, inputs=tuple(parts)))
    return None


def _pointwise(rewriter: Rewriter, position: int, operator: Operator) -> None:
    """Drop expansions before elementwise operators, which broadcast their inputs."""
    inputs = list(operator.inputs)
    shape = rewriter.type(operator.outputs[0]).shape
    for index, value in enumerate(inputs):
        inner = rewriter.producer(value)
        if inner is None or not isinstance(inner.kind, Expand):
            continue
        shapes = [rewriter.type(other).shape for other in (*inputs[:index], inner.inputs[0], *inputs[index + 1 :])]
        if broadcast(*shapes) == shape:
            inputs[index] = inner.inputs[0]
    if tuple(inputs) != operator.inputs:
        rewriter.replace(position, replace(operator, inputs=tuple(inputs)))


_RULES: dict[type, Callable[[Rewriter, int, Operator], None]] = {
    Reshape: _reshape,
    Permute: _permute,
    Slice: _slice,
    Expand: _expand,
    Cast: _drop_unchanged,
    Pad: _drop_unchanged,
    Concat: _concat,
    Pointwise: _pointwise,
}
