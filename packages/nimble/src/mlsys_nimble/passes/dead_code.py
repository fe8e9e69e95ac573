"""Removal of operators whose results nothing reads."""

from __future__ import annotations

from mlsys_nimble.ir.program import Program


def remove_dead_code(program: Program) -> Program:
    """Remove operators that contribute to no output and no mutation, and unread constants."""
    needed = set(program.kept())
    operators = []
    for operator in reversed(program.operators):
        if needed.intersection(operator.outputs):
            needed.update(operator.inputs)
            operators.append(operator)
    needed.update(old for old, _ in program.mutations)
    constants = {value: tensor for value, tensor in program.constants.items() if value in needed}
    return Program(
        program.values, tuple(reversed(operators)), program.inputs, program.outputs, constants, program.mutations
    )
