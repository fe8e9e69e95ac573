"""Fusions: a result that one operator alone reads is not written in between.

Epilogues (residual additions, activations) join the operator before them; chains of elementwise operators become one,
and sums of squares one pass; depthwise and 1x1 convolutions join where caches cannot hold the result between them; rows
of a graph net's messages are taken, scaled and added in one operator.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import get_args

from mlsys_nimble.ir.operators import (
    Activation,
    Convolution,
    Epilogue,
    Gather,
    IntegerProduct,
    Kind,
    Linear,
    Pointwise,
    Pool,
    Reduce,
    ScatterAdd,
    Separable,
    Step,
)
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.passes.rewrite import Rewriter

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
_WITH_SLOPE = ("leaky_relu", "elu")


def fuse_epilogues(program: Program) -> Program:
    """Absorb ``activation(y + residual)``, or parts of it, into the convolution, linear or pool that makes ``y``."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        if not isinstance(operator.kind, Pointwise) or len(operator.kind.steps) != 1:
            continue
        result = rewriter.type(operator.outputs[0])
        is_alike = operator.kind.dtype == result.dtype and all(rewriter.type(v) == result for v in operator.inputs)
        if not is_alike or len(set(operator.inputs)) != len(operator.inputs):
            continue
        for value in _latest_first(operator):
            main = rewriter.sole_producer(value)
            if main is None or not isinstance(main.kind, Convolution | Linear | Pool | IntegerProduct):
                continue
            epilogue = _extended(main.kind.epilogue, operator)
            if epilogue is None:
                continue
            residual = tuple(other for other in operator.inputs if other != value)
            kind = _with(main.kind, epilogue)
            rewriter.replace(position, replace(operator, kind=kind, inputs=main.inputs + residual, name=main.name))
            rewriter.drop(main)
            break
    return rewriter.build()


def _with(kind: Convolution | Linear | Pool | IntegerProduct, epilogue: Epilogue) -> Kind:
    if isinstance(kind, IntegerProduct):
        return replace(kind, main=replace(kind.main, epilogue=epilogue))
    return replace(kind, epilogue=epilogue)


def _latest_first(operator: Operator) -> list[ValueId]:
    """Return the inputs, last made first: that operator can add the other, which is there by then."""
    return sorted(operator.inputs, reverse=True)


def _extended(epilogue: Epilogue, operator: Operator) -> Epilogue | None:
    """Return the epilogue with one more elementwise step; None where it cannot hold the step."""
    assert isinstance(operator.kind, Pointwise)
    step = operator.kind.steps[0]
    if step.op == "add" and len(operator.inputs) == 2 and not epilogue.has_residual:
        return replace(epilogue, has_residual=True, activates_first=epilogue.activation is not None)
    if step.op in ACTIVATIONS and epilogue.activation is None:
        slope = float(step.arguments[1]) if step.op in _WITH_SLOPE else 0.0
        if step.op in _WITH_SLOPE and not isinstance(step.arguments[1], float):
            return None
        return replace(epilogue, activation=step.op, slope=slope)  # type: ignore[arg-type]
    return None


def fuse_messages(program: Program) -> Program:
    """Turn ``x.index_add(0, to, h[of] * scale)`` into one operator, with or without the factors ``[E, 1, ...]``."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        if operator.kind != ScatterAdd() or rewriter.type(operator.outputs[0]).dtype != "float32":
            continue
        x, indices, source = operator.inputs
        product, scale = _scaled(rewriter, source)
        rows = rewriter.sole_producer(source if product is None else _other(product, scale))
        if rows is None or not isinstance(rows.kind, Gather) or len(rewriter.type(rows.inputs[1]).shape) != 1:
            continue
        factors = () if scale is None else (scale,)
        kind = ScatterAdd(rows.kind, has_scale=scale is not None)
        rewriter.replace(position, replace(operator, kind=kind, inputs=(x, indices, *rows.inputs, *factors)))
        for done in (product, rows):
            if done is not None:
                rewriter.drop(done)
    return rewriter.build()


def _scaled(rewriter: Rewriter, rows: ValueId) -> tuple[Operator | None, ValueId | None]:
    """Return the product that scales each row by one number, and the numbers; None for both if there is none."""
    product = rewriter.sole_producer(rows)
    if product is None or not isinstance(product.kind, Pointwise) or product.kind.dtype != "float32":
        return None, None
    if product.kind.steps not in ((Step("mul", (0, 1)),), (Step("mul", (1, 0)),)):
        return None, None
    wanted = rewriter.type(rows)
    one_each = (wanted.shape[0], *(1 for _ in wanted.shape[1:]))
    for scale in product.inputs:
        type_ = rewriter.type(scale)
        if type_.shape == one_each and type_.dtype == "float32" and rewriter.type(_other(product, scale)) == wanted:
            return product, scale
    return None, None


def _other(product: Operator, one: ValueId | None) -> ValueId:
    return product.inputs[product.inputs[0] == one]


LEAST_NBYTES = 384 << 10  # of the intermediate result; a smaller one stays in the second-level cache
MOST_WEIGHTS_NBYTES = 128 << 10  # of the 1x1 convolution, which are read once for every row of pixels


def fuse_separables(program: Program) -> Program:
    """Fuse the pairs that gain by it: small weights, a large intermediate result."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        first = rewriter.sole_producer(operator.inputs[0]) if operator.inputs else None
        if first is None or not _is_pointwise(rewriter, operator) or not _is_depthwise(rewriter, first):
            continue
        weight, between = rewriter.type(operator.inputs[1]), rewriter.type(first.outputs[0])
        if between.nbytes < LEAST_NBYTES or weight.nbytes > MOST_WEIGHTS_NBYTES:
            continue
        assert isinstance(first.kind, Convolution)
        assert isinstance(operator.kind, Convolution)
        kind = Separable(first.kind, operator.kind)
        rewriter.replace(position, replace(operator, kind=kind, inputs=(*first.inputs, *operator.inputs[1:])))
        rewriter.drop(first)
    return rewriter.build()


def _is_pointwise(rewriter: Rewriter, operator: Operator) -> bool:
    kind = operator.kind
    return (
        isinstance(kind, Convolution)
        and _is_plain(rewriter, operator)
        and prod(rewriter.type(operator.inputs[1]).shape[2:]) == 1
        and kind.groups == 1
        and {*kind.stride} == {1}
        and not any(map(any, kind.padding))
    )


def _is_depthwise(rewriter: Rewriter, operator: Operator) -> bool:
    kind = operator.kind
    if not isinstance(kind, Convolution) or not _is_plain(rewriter, operator) or kind.epilogue.has_residual:
        return False
    weight = rewriter.type(operator.inputs[1])
    return weight.shape[1] == 1 and kind.groups == weight.shape[0]


def _is_plain(rewriter: Rewriter, operator: Operator) -> bool:
    """Return whether it is a float32 convolution over planes whose parameters are constants."""
    assert isinstance(operator.kind, Convolution)
    parameters = operator.inputs[1 : 2 + operator.kind.has_bias]
    return (
        len(operator.kind.stride) == 2
        and rewriter.type(operator.outputs[0]).dtype == "float32"
        and all(rewriter.constant(value) is not None for value in parameters)
    )


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
