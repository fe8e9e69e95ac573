"""Loss of precision on request: weights of linears and convolutions rounded to bf16."""

from __future__ import annotations

from dataclasses import replace

from mlsys_nimble.ir.operators import Convolution, Kind, Linear, Separable
from mlsys_nimble.ir.program import Program, ValueId
from mlsys_nimble.passes.dead_code import remove_dead_code


def round_weights(program: Program) -> Program:
    """Round the constant weights of linears and convolutions to bf16, to the nearest, ties to even; they stay float32.

    Sums, biases and values between operators keep their precision. An executor may then keep the weights in
    half the memory without a further loss.
    """
    changed = {buffer for buffer, _ in program.mutations}
    values, constants, operators = list(program.values), dict(program.constants), list(program.operators)
    rounded: dict[ValueId, ValueId] = {}  # the rounded value of a weight; others may still read the weight itself
    for index, operator in enumerate(operators):
        inputs = list(operator.inputs)
        for number in _weights(operator.kind):
            weight = inputs[number]
            if weight not in program.constants or weight in changed or values[weight].dtype != "float32":
                continue
            if weight not in rounded:
                rounded[weight] = len(values)
                values.append(values[weight])
                constants[rounded[weight]] = constants[weight].detach().bfloat16().float()
            inputs[number] = rounded[weight]
        operators[index] = replace(operator, inputs=tuple(inputs))
    made = replace(program, values=tuple(values), operators=tuple(operators), constants=constants)
    return remove_dead_code(made)


def _weights(kind: Kind) -> tuple[int, ...]:
    """Return the indices of inputs that are weights of linears and convolutions."""
    if isinstance(kind, Separable):
        return 1, 2 + kind.depthwise.has_bias
    return (1,) if isinstance(kind, Convolution | Linear) else ()
