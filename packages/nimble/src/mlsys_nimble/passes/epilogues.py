"""Fusion of residual additions and activations into the operator before them, as its epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from mlsys_nimble.ir.operators import Activation, Convolution, Epilogue, IntegerProduct, Kind, Linear, Pointwise, Pool
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
