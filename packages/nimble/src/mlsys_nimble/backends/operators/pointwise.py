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

_WIDTHS = {"bool": 0, "uint8": 1, "int32": 4, "int64": 8}  # bytes of dtypes computed in integers; bool: 0
_OF_INTEGERS = frozenset(
    {
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
        *("where", "maximum", "minimum", "relu", "clamp", "add", "sub", "mul", "neg", "abs", "square"),
    }
)


@FAMILY.meaning(kinds.Pointwise)
def _pointwise(kind: kinds.Pointwise, inputs: tuple[ValueType, ...], result: ValueType) -> Run:
    return compile_pointwise(kind, inputs, result)


@FAMILY.lowering(kinds.Pointwise, dtypes=frozenset({"float32", *_WIDTHS}))
def _lower_pointwise(call: Call) -> Kernel | None:
    return None if not _is_exact(call.kind, call.inputs) else pointwise(call.kind, call.inputs, call.out)


def _is_exact(kind: kinds.Pointwise, inputs: Sequence[View]) -> bool:
    """Return whether the kernel, which computes integers in 64 bits, gives what torch does in ``kind.dtype``."""
    if kind.dtype in ("float32", "bool"):
        return True
    width = _WIDTHS.get(kind.dtype, 0)
    constants = [each for step in kind.steps for each in step.arguments if isinstance(each, float)]
    fit = all(each.is_integer() and abs(each) < 2.0 ** (8 * width - 1) for each in constants)
    known = all(step.op in _OF_INTEGERS for step in kind.steps)
    return known and fit and all(_WIDTHS.get(view.dtype, 9) <= width for view in inputs)


def pointwise(kind: kinds.Pointwise, inputs: Sequence[View], out: View) -> Kernel:
    """Bind a chain of steps to inputs of any dtypes that broadcast to out's shape.

    An input may be the same view as ``out``. Integers are computed in 64 bits and wrap around as their dtype does;
    float64 and bool are computed in double.
    """
    library = load()
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
        "dtype": kind.dtype,
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
