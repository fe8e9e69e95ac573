"""Passes over training graphs: weights are inputs, so nothing folds, and batch norms use the batch's statistics."""

from __future__ import annotations

from dataclasses import replace

from mlsys_nimble.ir.operators import (
    Aten,
    BatchNormGradient,
    BatchNormTraining,
    Concat,
    Epilogue,
    Input,
    Pad,
    Pointwise,
    Reduce,
    Step,
)
from mlsys_nimble.ir.program import Operator, Program, ValueId
from mlsys_nimble.passes import Pass
from mlsys_nimble.passes.constants import remove_dead_code, share_subexpressions
from mlsys_nimble.passes.fusion import fuse_elementwise
from mlsys_nimble.passes.views import simplify_views

GRADIENT = "aten.convolution_backward.default"
_FORWARD = "aten._native_batch_norm_legit_functional.default"
_BACKWARD = "aten.native_batch_norm_backward.default"
_ALL = tuple(Input(index) for index in range(7))


def find_batch_norms(program: Program) -> Program:
    """Replace batch norms of float32 images, and their gradients, by operators that have kernels."""
    return replace(program, operators=tuple(_found(program, operator) for operator in program.operators))


def _found(program: Program, operator: Operator) -> Operator:
    kind = operator.kind
    if not isinstance(kind, Aten) or any(program.values[value].dtype != "float32" for value in operator.inputs):
        return operator
    arguments = kind.arguments
    if kind.target == _FORWARD and arguments[:5] == _ALL[:5] and arguments[5] is True:
        return replace(operator, kind=BatchNormTraining(momentum=arguments[6], eps=arguments[7]))
    if kind.target == _BACKWARD and arguments[7] is True and arguments[9] == (True, True, True):
        if arguments[:7] == _ALL:  # the running statistics are not read
            return replace(operator, kind=BatchNormGradient(), inputs=operator.inputs[:3] + operator.inputs[5:])
        if arguments[:7] == (*_ALL[:3], None, None, *_ALL[3:5]):
            return replace(operator, kind=BatchNormGradient())
    return operator


def split_convolution_gradients(program: Program) -> Program:
    """Split a convolution's gradients into one operator each for input and weight, and a sum for the bias."""
    return replace(
        program, operators=tuple([part for operator in program.operators for part in _gradients(program, operator)])
    )


def _gradients(program: Program, operator: Operator) -> list[Operator]:
    kind = operator.kind
    if not isinstance(kind, Aten) or kind.target != GRADIENT or kind.arguments[:3] != _ALL[:3]:
        return [operator]
    *arguments, wanted = kind.arguments
    arguments[3] = None  # sizes of the bias
    num_results = len(operator.outputs)
    if num_results not in (3, sum(wanted)):
        return [operator]
    outputs = iter(operator.outputs)
    results = [next(outputs) if is_wanted or num_results == 3 else None for is_wanted in wanted]  # oneDNN may give more
    found: list[Operator] = []
    for number, name in enumerate(("input", "weight")):
        value = results[number]
        if wanted[number] and value is not None:
            kind = Aten(kind.target, (*arguments, (number == 0, number == 1, False)), kind.keywords)
            found.append(replace(operator, name=f"{operator.name}_{name}", kind=kind, outputs=(value,)))
    if wanted[2] and results[2] is not None:
        dims = tuple([dim for dim in range(len(program.values[operator.inputs[0]].shape)) if dim != 1])
        total = Reduce("sum", dims, keeps_dims=False)
        name, dy = f"{operator.name}_bias", operator.inputs[:1]
        found.append(replace(operator, name=name, kind=total, inputs=dy, outputs=(results[2],)))
    return found


def fuse_norm_epilogues(program: Program) -> Program:
    """Fuse ``relu(norm(x) + residual)``, or parts of it, where nothing else reads the norm's result."""
    consumers, kept = program.consumers(), program.kept()
    operators: list[Operator | None] = list(program.operators)
    producers = program.producers()
    for index, operator in enumerate(program.operators):
        if not isinstance(operator.kind, BatchNormTraining):
            continue
        y = operator.outputs[0]
        readers = consumers.get(y, [])
        if len(readers) != 1 or y in kept:
            continue
        reader = program.operators[readers[0]]
        found = _epilogue(program, reader, y)
        if found is None or any(producers.get(value, -1) > index for value in found[1]):
            continue  # the residual is made after the norm, whose statistics may be read before
        epilogue, residual = found
        operators[index] = replace(
            operator,
            kind=replace(operator.kind, epilogue=epilogue),
            inputs=operator.inputs + residual,
            outputs=(reader.outputs[0], *operator.outputs[1:]),
        )
        operators[readers[0]] = None
    return replace(program, operators=tuple(operator for operator in operators if operator is not None))


def _epilogue(program: Program, reader: Operator, y: ValueId) -> tuple[Epilogue, tuple[ValueId, ...]] | None:
    """Return ``reader`` as an epilogue of ``y``, with the residual that it adds; None if it is no epilogue."""
    kind = reader.kind
    types = {program.values[value] for value in (*reader.inputs, *reader.outputs)}
    if not isinstance(kind, Pointwise) or kind.dtype != "float32" or len(types) != 1:
        return None
    if kind.steps == (Step("relu", (0,)),):
        return Epilogue("relu"), ()
    add, *rest = kind.steps
    if add not in (Step("add", (0, 1)), Step("add", (1, 0))) or rest not in ([], [Step("relu", (-1,))]):
        return None
    residual = tuple(value for value in reader.inputs if value != y)
    return (Epilogue("relu" if rest else None, has_residual=True), residual) if len(residual) == 1 else None


def join_parts(program: Program) -> Program:
    """Replace a sum of zero-padded parts by a concatenation, where the parts make up the whole."""
    producers, consumers, kept = program.producers(), program.consumers(), program.kept()
    operators = list(program.operators)
    for index, operator in enumerate(program.operators):
        if not isinstance(operator.kind, Pointwise) or not _is_sum(operator.kind, len(operator.inputs)):
            continue
        parts: list[tuple[int, int, ValueId]] = []  # (start, size, value)
        dims: set[int] = set()
        for value in operator.inputs:
            source = program.operators[producers[value]] if value in producers else None
            is_shared = value in kept or len(consumers[value]) > 1
            if source is None or is_shared or not isinstance(source.kind, Pad) or source.kind.value != 0:
                break
            padded = [dim for dim, amounts in enumerate(source.kind.amounts) if amounts != (0, 0)]
            if len(padded) != 1:
                break
            dims.add(padded[0])
            size = program.values[source.inputs[0]].shape[padded[0]]
            parts.append((source.kind.amounts[padded[0]][0], size, source.inputs[0]))
        whole = program.values[operator.outputs[0]]
        parts.sort()
        ends = [start + size for start, size, _ in parts]
        if len(parts) != len(operator.inputs) or len(dims) != 1:
            continue
        if [0, *ends] == [*(start for start, _, _ in parts), whole.shape[min(dims)]]:
            inputs = tuple(value for _, _, value in parts)
            operators[index] = replace(operator, kind=Concat(min(dims)), inputs=inputs)
    return replace(program, operators=tuple(operators))


def _is_sum(kind: Pointwise, num_inputs: int) -> bool:
    """Return whether the steps add up all inputs, each once."""
    arguments = [argument for step in kind.steps for argument in step.arguments]
    wanted = [*range(num_inputs), *range(-1, -len(kind.steps), -1)]
    return all(step.op == "add" for step in kind.steps) and sorted(arguments) == sorted(wanted)


TRAINING_PASSES: tuple[Pass, ...] = (
    remove_dead_code,
    simplify_views,
    share_subexpressions,
    find_batch_norms,
    split_convolution_gradients,
    fuse_elementwise,
    join_parts,
    fuse_norm_epilogues,
    simplify_views,
    remove_dead_code,
)
