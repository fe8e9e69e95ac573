"""Loss of precision on request: weights of linears and convolutions rounded to bf16, and their inputs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from mlsys_nimble.ir.operators import Bf16Product, Convolution, Kind, Linear, Separable
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.passes.constants import remove_dead_code

LEAST_TERMS = 32  # products of a convolution's result, from which on its inputs are rounded


def round_weights(program: Program) -> Program:
    """Round the constant weights of linears and convolutions to bf16, to the nearest, ties to even; they stay float32.

    Sums, biases and values between operators keep their precision. An executor may then keep the weights in
    half the memory without a further loss.
    """
    fixed = _fixed(program)
    values, constants, operators = list(program.values), dict(program.constants), list(program.operators)
    rounded: dict[ValueId, ValueId] = {}  # the rounded value of a weight; others may still read the weight itself
    for index, operator in enumerate(operators):
        inputs = list(operator.inputs)
        for number in _weights(operator.kind):
            weight = inputs[number]
            if weight not in fixed:
                continue
            if weight not in rounded:
                rounded[weight] = len(values)
                values.append(values[weight])
                constants[rounded[weight]] = constants[weight].detach().bfloat16().float()
            inputs[number] = rounded[weight]
        operators[index] = replace(operator, inputs=tuple(inputs))
    made = replace(program, values=tuple(values), operators=tuple(operators), constants=constants)
    return remove_dead_code(made)


def multiply_pairs(program: Program) -> Program:
    """Round the inputs of linears and convolutions to bf16 as well, after :func:`round_weights`.

    Those whose weights are not constant keep float32 inputs. So do convolutions of one channel a group, and of few
    products a result: to round would take longer than to multiply.
    """
    fixed = _fixed(program)

    def changed(operator: Operator) -> Operator:
        kind = operator.kind
        if not isinstance(kind, Convolution | Linear) or operator.inputs[1] not in fixed:
            return operator
        channels, *kernel = program.values[operator.inputs[1]].shape[1:]
        if isinstance(kind, Convolution) and (channels == 1 or channels * prod(kernel) < LEAST_TERMS):
            return operator
        return replace(operator, kind=Bf16Product(kind))

    return replace(program, operators=tuple(map(changed, program.operators)))


def _fixed(program: Program) -> set[ValueId]:
    """Return the float32 constants that no call changes."""
    changed = {buffer for buffer, _ in program.mutations}
    return {value for value in program.constants if value not in changed and program.values[value].dtype == "float32"}


def _weights(kind: Kind) -> tuple[int, ...]:
    """Return the indices of inputs that are weights of linears and convolutions."""
    if isinstance(kind, Separable):
        return 1, 2 + kind.depthwise.has_bias
    return (1,) if isinstance(kind, Convolution | Linear) else ()
