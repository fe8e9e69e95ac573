"""The pre-run of a training graph (section 3.3.1): one run, operator by operator, that finds the strides of all values.

Strides and shared memory of torch's results are observed; results of kernels get the strides that the kernels prefer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlsys_nimble.backends.table import Run
from mlsys_nimble.ir.operators import Copy
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.ir.strides import Strides
from mlsys_nimble.training.binding import image_inputs, strides_by_kernel, torch_run
from mlsys_nimble.training.gemms import Into


@dataclass(frozen=True, slots=True)
class Prerun:
    """Layout found by a pre-run."""

    program: Program  # with copies of inputs that kernels take in other strides
    runs: tuple[Run | None, ...]  # by operator: torch's function; None: kernels run it
    placed: frozenset[ValueId]  # values in planned memory, made by kernels or by an Into
    strides: dict[ValueId, Strides]
    root: dict[ValueId, ValueId]  # the value that owns the memory; the value itself, if it owns any


def prerun(program: Program, inputs: Sequence[Tensor]) -> Prerun:
    """Run the program once on inputs with the strides of later calls; inputs are not written to."""
    values = list(program.values)
    tensors: dict[ValueId, Tensor] = dict(zip(program.inputs, inputs, strict=True))
    tensors.update(program.constants)
    root = {value: value for value in tensors}
    operators: list[Operator] = []
    runs: list[Run | None] = []
    placed: set[ValueId] = set()

    def visit(operator: Operator, run: Run, strides: list[Strides] | None) -> None:
        arguments = [tensors[value] for value in operator.inputs]
        made = run(*arguments)
        results = [made] if isinstance(made, Tensor) else list(made)
        for number, (value, result) in enumerate(zip(operator.outputs, results, strict=True)):
            root[value] = value
            if strides is not None:
                result = torch.empty_strided(result.shape, strides[number], dtype=result.dtype).copy_(result)
            else:
                for name, argument in zip(operator.inputs, arguments, strict=True):
                    if result.untyped_storage()._cdata == argument.untyped_storage()._cdata:
                        root[value] = root[name]
            tensors[value] = result
        operators.append(operator)
        runs.append(run if strides is None or isinstance(run, Into) else None)
        placed.update(operator.outputs if strides is not None else ())

    for operator in program.operators:
        lies_badly = image_inputs(operator, values, [tensors[value] for value in operator.inputs])
        for index in lies_badly:
            value = operator.inputs[index]
            copied = len(values)
            values.append(values[value])
            visit(Operator(f"{operator.name}_input{index}", Copy(), (value,), (copied,)), _channels_last, None)
            operator = replace(operator, inputs=(*operator.inputs[:index], copied, *operator.inputs[index + 1 :]))
        run = torch_run(operator, values)
        if isinstance(run, Into):
            visit(operator, run, [run.strides])
        else:
            visit(operator, run, strides_by_kernel(operator, values, [tensors[value] for value in operator.inputs]))
    found = replace(program, values=tuple(values), operators=tuple(operators))
    return Prerun(
        found, tuple(runs), frozenset(placed), {value: tensor.stride() for value, tensor in tensors.items()}, root
    )


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
