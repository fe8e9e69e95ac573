"""Fusion of chains of elementwise operators into one; ``x * sigmoid(x)`` becomes one step, sums of squares one pass."""

from __future__ import annotations

from dataclasses import replace

from mlsys_nimble.ir.operators import Pointwise, Reduce, Step
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.passes.rewrite import Rewriter

MAX_STEPS = 24
MAX_INPUTS = 8


def fuse_elementwise(program: Program) -> Program:
    """Fuse into each elementwise operator those that it alone reads, where shapes agree: nothing is computed twice."""
    rewriter = Rewriter(program)
    for position in reversed(range(len(rewriter.operators))):
        current = rewriter.at(position)
        if current is None:
            continue
        _square_within(rewriter, position, current)
        while (fused := _take_one(rewriter, position, current)) is not None:
            current = fused
        shortened = _shorten(current)
        if shortened is not current:
            rewriter.replace(position, shortened)
    return rewriter.build()


def _square_within(rewriter: Rewriter, position: int, total: Operator) -> None:
    """Let a sum or mean of squares square what it reads."""
    if not isinstance(total.kind, Reduce) or total.kind.op not in ("sum", "mean") or total.kind.squares:
        return
    inner = rewriter.sole_producer(total.inputs[0])
    if inner is None or inner.kind != Pointwise((Step("square", (0,)),), "float32"):
        return
    if rewriter.type(inner.inputs[0]).dtype == "float32":
        rewriter.replace(position, replace(total, kind=replace(total.kind, squares=True), inputs=inner.inputs))
        rewriter.drop(inner)


def _take_one(rewriter: Rewriter, position: int, consumer: Operator) -> Operator | None:
    """Fuse one producer into the consumer and return it; None if no producer fits."""
    if not isinstance(consumer.kind, Pointwise):
        return None
    shape = rewriter.type(consumer.outputs[0]).shape
    for value in consumer.inputs:
        inner = rewriter.sole_producer(value)
        if inner is None or not isinstance(inner.kind, Pointwise) or inner.kind.dtype != consumer.kind.dtype:
            continue
        type_ = rewriter.type(value)
        if type_.shape != shape or type_.dtype not in (inner.kind.dtype, "bool"):
            continue
        if type_.dtype == "bool" and inner.kind.steps[-1].op not in _TRUTHS:
            continue
        kind, inputs = _joined(inner, consumer, value)
        if len(kind.steps) > MAX_STEPS or len(inputs) > MAX_INPUTS:
            continue
        fused = replace(consumer, kind=kind, inputs=inputs)
        rewriter.replace(position, fused)
        rewriter.drop(inner)
        return fused
    return None


_TRUTHS = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not")  # give 1.0 or 0.0


def _joined(inner: Operator, outer: Operator, value: ValueId) -> tuple[Pointwise, tuple[ValueId, ...]]:
    """Return the steps of ``inner``, then those of ``outer``, which read ``value`` from the last step of ``inner``."""
    assert isinstance(inner.kind, Pointwise)
    assert isinstance(outer.kind, Pointwise)
    inputs = tuple(dict.fromkeys((*inner.inputs, *(v for v in outer.inputs if v != value))))
    index_of = {v: index for index, v in enumerate(inputs)}
    shift = len(inner.kind.steps)

    def moved(steps: tuple[Step, ...], read: tuple[ValueId, ...], by: int) -> list[Step]:
        def argument(a: int | float) -> int | float:
            if isinstance(a, float):
                return a
            if a < 0:
                return a - by
            return -shift if read[a] == value else index_of[read[a]]  # -shift: the last step of inner

        return [Step(step.op, tuple(map(argument, step.arguments))) for step in steps]

    steps = moved(inner.kind.steps, inner.inputs, 0) + moved(outer.kind.steps, outer.inputs, shift)
    return Pointwise(tuple(steps), outer.kind.dtype), inputs


def _shorten(operator: Operator) -> Operator:
    """Replace ``x * sigmoid(x)`` by silu, where these are the only steps."""
    if isinstance(operator.kind, Pointwise) and len(operator.inputs) == 1:
        first, *rest = operator.kind.steps
        if first == Step("sigmoid", (0,)) and rest in ([Step("mul", (0, -1))], [Step("mul", (-1, 0))]):
            return replace(operator, kind=Pointwise((Step("silu", (0,)),), operator.kind.dtype))
    return operator
