"""Elementwise chains (pointwise.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from mlsys_nimble.backends.cpu import loops
from mlsys_nimble.backends.cpu.library import Kernel, View, array_of, load
from mlsys_nimble.backends.reference.pointwise import compile_pointwise
from mlsys_nimble.backends.table import Call, Family, Run
from mlsys_nimble.ir import operators as kinds
from mlsys_nimble.ir.program import ValueType

FAMILY = Family()

_NEVER_WRAP = frozenset(
    {
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
        *("where", "maximum", "minimum", "relu", "sign"),
    }
)


@FAMILY.meaning(kinds.Pointwise)
def _pointwise(kind: kinds.Pointwise, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return compile_pointwise(kind, inputs, result)


@FAMILY.lowering(kinds.Pointwise, dtypes=frozenset({"float32", "bool", "int32", "uint8"}))
def _lower_pointwise(call: Call) -> Kernel | None:
    return None if not _is_exact(call.kind) else pointwise(call.kind, call.inputs, call.out)


def _is_exact(kind: kinds.Pointwise) -> bool:
    """Return whether the kernel, which computes integers in double, equals arithmetic that wraps around."""
    if kind.dtype in ("float32", "bool"):
        return True
    return all(step.op in _NEVER_WRAP for step in kind.steps)


def pointwise(kind: kinds.Pointwise, inputs: Sequence[View], out: View, *, library: Any = None) -> Kernel:
    """Bind a chain of steps to inputs of any dtypes that broadcast to out's shape.

    An input may be the same view as ``out``. Integers and float64 are computed in double: exact to 2^53.
    """
    library = library or load()
    views = loops.merged([*(loops.broadcast(view, out.shape) for view in inputs), out])
    steps, num_registers = _allocated(kind.steps, len(inputs), library)
    inputs_struct = array_of(library.structs["View"], views[:-1])
    steps_struct = array_of(library.structs["Step"], steps)
    arguments = {
        "inputs": ctypes.addressof(inputs_struct),
        "num_inputs": len(inputs),
        "num_registers": num_registers,
        "steps": ctypes.addressof(steps_struct),
        "num_steps": len(steps),
        "is_wide": kind.dtype not in ("float32", "bfloat16"),
        "is_integral": "int" in kind.dtype,
        "out": views[-1],
    }
    return Kernel(library, "pointwise", arguments, inputs_struct, steps_struct)


def _allocated(steps: Sequence[kinds.Step], num_inputs: int, library: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the steps with registers for their results, and how many registers; one is free after its last reader."""
    last_use = {
        -1 - argument: index
        for index, step in enumerate(steps)
        for argument in step.arguments
        if isinstance(argument, int) and argument < 0
    }
    register_of: dict[int, int] = {}
    free: list[int] = []
    num_registers = num_inputs
    allocated = []
    for index, step in enumerate(steps):
        registers, constants = [-1, -1, -1], [0.0, 0.0, 0.0]
        for position, argument in enumerate(step.arguments):
            if isinstance(argument, float):
                constants[position] = argument
            else:
                registers[position] = argument if argument >= 0 else register_of[-1 - argument]
        read = {-1 - argument for argument in step.arguments if isinstance(argument, int) and argument < 0}
        free += [register_of[made] for made in read if last_use[made] == index]
        if free:
            register_of[index] = free.pop()
        else:
            register_of[index], num_registers = num_registers, num_registers + 1
        op = step.op if step.op in library.enums["Op"] else f"op_{step.op}"
        target = register_of[index]
        allocated.append({"op": op, "registers": registers, "constants": constants, "target": target})
    most = library.constants["MAX_REGISTERS"]
    if num_registers > most:
        raise ValueError(f"{num_registers} values at once in one chain; {most} are allowed, fuse less")
    return allocated, num_registers
