"""Linear layers of a training graph as operators over rows, fused with the operators around them.

AOTAutograd gives products of matrices between views, copies, additions and sums. The order of a GEMM's rows does not
matter, so views that only reorder rows move before it. Then a bias, a residual, a relu or a relu's gradient follows
directly and is fused into it. The sum over rows that is a bias's gradient is fused into the weight's gradient.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from mlsys_nimble.ir.operators import (
    VIEWS,
    Copy,
    Epilogue,
    Gemm,
    MatMul,
    Permute,
    Pointwise,
    Reduce,
    Reshape,
    Step,
    WeightGradient,
)
from mlsys_nimble.ir.program import Operator, Program, ValueId, ValueType
from mlsys_nimble.passes.constants import remove_dead_code
from mlsys_nimble.passes.rewrite import Rewriter
from mlsys_nimble.passes.views import simplify_views
from mlsys_nimble.training.chains import columns_of, insert_before, straighten

LEAST_ROWS = 64  # with fewer, packing the weights costs more than it saves
MOST_DIMS = 3  # of rows


def share_saved_copies(program: Program, num_results: int) -> Program:
    """Drop copies of values that only the backward pass reads: nothing writes there, so memory may be shared.

    Args:
        program: Forward graph.
        num_results: Number of first outputs that the caller gets; the others are saved.
    """
    roots = _roots(program)
    seen = {roots.get(value, value) for value in program.outputs[:num_results]}
    seen |= {roots.get(new, new) for _, new in program.mutations} | {*program.inputs, *program.constants}
    lasting = set(program.outputs[:num_results]) | {new for _, new in program.mutations}
    for operator in reversed(program.operators):
        if isinstance(operator.kind, (*VIEWS, Copy)) and lasting.intersection(operator.outputs):
            lasting.update(operator.inputs)
    rewriter = Rewriter(program)
    for _, operator in rewriter:
        if isinstance(operator.kind, Copy) and operator.outputs[0] not in lasting:
            source = operator.inputs[0]
            if roots.get(source, source) not in seen:
                rewriter.substitute(operator, source)
    return rewriter.build()


def _roots(program: Program) -> dict[ValueId, ValueId]:
    """Return for each view the value whose memory it may share; copies count as views, as they may be dropped."""
    roots: dict[ValueId, ValueId] = {}
    for operator in program.operators:
        if isinstance(operator.kind, (*VIEWS, Copy)):
            roots[operator.outputs[0]] = roots.get(operator.inputs[0], operator.inputs[0])
    return roots


def join_rows(program: Program, lanes: int) -> Program:
    """Find GEMMs of many rows and the gradients of their weights, and fuse the operators around them.

    Args:
        program: Program after the passes of training; GEMMs are found in float32.
        lanes: Number of columns in a vector; GEMMs have whole vectors of columns.
    """
    program = _taken_in(find_gemms(program, lanes))
    program = _taken_in(spread_rows(program))
    return remove_dead_code(simplify_views(straighten(sum_biases(program))))


def _taken_in(program: Program) -> Program:
    while True:
        program = remove_dead_code(straighten(program))
        joined = take_in(program)
        if joined is program:
            return program
        program = joined


def find_gemms(program: Program, lanes: int) -> Program:
    """Find GEMMs, and those with a transposed first matrix, which are gradients of weights."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        types = [rewriter.type(value) for value in (*operator.inputs, *operator.outputs)]
        if operator.kind != MatMul() or any(type_.dtype != "float32" or len(type_.shape) != 2 for type_ in types):
            continue
        (a, b), (count, depth), columns = operator.inputs, types[0].shape, types[2].shape[1]
        turned = rewriter.producer(a)
        if columns % lanes or depth == 0:
            continue
        if turned is not None and turned.kind == Permute((1, 0)):
            if depth >= LEAST_ROWS and count % lanes == 0:
                rewriter.replace(position, replace(operator, kind=WeightGradient(), inputs=(turned.inputs[0], b)))
        elif count >= LEAST_ROWS:
            rewriter.replace(position, replace(operator, kind=Gemm()))
    return rewriter.build()


def spread_rows(program: Program) -> Program:
    """Keep the dimensions of rows that were merged from several, since a merge may need a copy."""
    rewriter = Rewriter(program)
    for position, operator in rewriter:
        if isinstance(operator.kind, WeightGradient):
            _spread_gradient(rewriter, position, operator)
        elif isinstance(operator.kind, Gemm):
            rows = _rows_of(rewriter, position, operator, operator.inputs[0])
            shape = (*rewriter.type(rows).shape[:-1], rewriter.type(operator.outputs[0]).shape[-1])
            if len(shape) > 2:
                inputs = (rows, *operator.inputs[1:])
                made = insert_before(rewriter, position, operator, operator.kind, inputs, ValueType(shape, "float32"))
                rewriter.replace(position, replace(operator, kind=Reshape(), inputs=(made,)))
    return rewriter.build()


def _spread_gradient(rewriter: Rewriter, position: int, operator: Operator) -> None:
    found = [_rows_of(rewriter, position, operator, value) for value in operator.inputs]
    shapes = [rewriter.type(value).shape for value in found]
    if shapes[0][:-1] != shapes[1][:-1]:  # views of the same rows: split one like the other
        few = min((0, 1), key=lambda index: len(shapes[index]))
        value = operator.inputs[few]
        shape = (*shapes[1 - few][:-1], rewriter.type(value).shape[-1])
        found[few] = insert_before(rewriter, position, operator, Reshape(), (value,), ValueType(shape, "float32"))
    rewriter.replace(position, replace(operator, inputs=tuple(found)))


def _rows_of(rewriter: Rewriter, position: int, operator: Operator, value: ValueId) -> ValueId:
    """Return a matrix as rows of several dimensions, if it was merged from them."""
    source = rewriter.producer(value)
    if source is None or not isinstance(source.kind, Reshape):
        return value
    shape, depth = rewriter.type(source.inputs[0]).shape, rewriter.type(value).shape[1]
    cut = len(shape)
    while cut and prod(shape[cut:]) < depth:
        cut -= 1
    if len(rewriter.type(value).shape) != 2 or prod(shape[cut:]) != depth or not 2 <= cut <= MOST_DIMS:
        return value
    if cut == len(shape) - 1:
        return source.inputs[0]
    return insert_before(
        rewriter, position, operator, Reshape(), source.inputs, ValueType((*shape[:cut], depth), "float32")
    )


def take_in(program: Program) -> Program:
    """Fuse GEMMs with views and elementwise operators that alone read them; return the same program if none do."""
    rewriter = Rewriter(program)
    changed = False
    for position, operator in rewriter:
        if isinstance(operator.kind, Reshape | Permute):
            changed |= _order_rows(rewriter, position, operator)
        elif isinstance(operator.kind, Pointwise) and operator.kind.dtype == "float32":
            for value in operator.inputs:
                gemm = rewriter.sole_producer(value)
                if gemm is None or not isinstance(gemm.kind, Gemm):
                    continue
                joined = _joined(rewriter, gemm, operator, value)
                if joined is not None:
                    rewriter.replace(position, joined)
                    rewriter.drop(gemm)
                    changed = True
                    break
    return rewriter.build() if changed else program


def _order_rows(rewriter: Rewriter, position: int, operator: Operator) -> bool:
    """Replace a view of a GEMM's rows by a GEMM of viewed rows; return whether it was possible."""
    gemm = rewriter.sole_producer(operator.inputs[0])
    if gemm is None or not isinstance(gemm.kind, Gemm):
        return False
    if gemm.kind.has_mask or gemm.kind.epilogue.has_residual:
        return False
    shape, before = (rewriter.type(v).shape for v in (operator.outputs[0], operator.inputs[0]))
    if isinstance(operator.kind, Permute):
        if operator.kind.dims[-1] != len(before) - 1:
            return False
    elif shape[-1] != before[-1] or not _is_split(before[:-1], shape[:-1]):
        return False
    a = rewriter.type(gemm.inputs[0])
    type_ = ValueType((*shape[:-1], a.shape[-1]), a.dtype)
    rows = insert_before(rewriter, position, operator, operator.kind, gemm.inputs[:1], type_)
    rewriter.replace(position, replace(gemm, inputs=(rows, *gemm.inputs[1:]), outputs=operator.outputs))
    rewriter.drop(gemm)
    return True


def _is_split(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether dimensions are only split, into at most MOST_DIMS."""
    left = [size for size in after if size != 1]
    for size in before:
        while size > 1:
            if not left or size % left[0]:
                return False
            size //= left.pop(0)
    return not left and len(after) <= MOST_DIMS


def _joined(rewriter: Rewriter, gemm: Operator, reader: Operator, value: ValueId) -> Operator | None:
    """Return the GEMM fused with ``reader``; None if its epilogue cannot express what ``reader`` does."""
    assert isinstance(gemm.kind, Gemm)
    assert isinstance(reader.kind, Pointwise)
    type_, kind, own = rewriter.type(value), gemm.kind, reader.inputs.index(value)
    if rewriter.type(reader.outputs[0]) != type_ or kind.has_mask:
        return None
    inputs = list(gemm.inputs)
    if reader.kind.steps == (Step("le", (1 - own, 0.0)), Step("where", (-1, 0.0, own))):
        mask = reader.inputs[1 - own]
        if rewriter.type(mask) != type_ or kind.epilogue.has_residual:
            return None
        inputs.insert(2 + kind.has_bias, mask)
        return replace(gemm, kind=replace(kind, has_mask=True), inputs=tuple(inputs), outputs=reader.outputs)
    so_far = own
    for number, step in enumerate(reader.kind.steps):
        others = [argument for argument in step.arguments if argument != so_far]
        epilogue = kind.epilogue
        if epilogue.activation is not None or len(others) + 1 != len(step.arguments):
            return None
        if step.op == "relu":
            kind = replace(kind, epilogue=replace(epilogue, activation="relu"))
        elif step.op == "add" and isinstance(others[0], int) and others[0] >= 0:
            other = reader.inputs[others[0]]
            if rewriter.type(other) == type_ and not epilogue.has_residual and other != value:
                inputs.append(other)
                kind = replace(kind, epilogue=Epilogue(has_residual=True))
            elif rewriter.type(other).shape == type_.shape[-1:] and not kind.has_bias:
                inputs.insert(2, other)
                kind = replace(kind, has_bias=True)
            else:
                return None
        else:
            return None
        so_far = -1 - number
    if any(rewriter.type(other).dtype != "float32" for other in inputs):
        return None
    return replace(gemm, kind=kind, inputs=tuple(inputs), outputs=reader.outputs)


def sum_biases(program: Program) -> Program:
    """Make a sum over the rows of a weight gradient's ``dy`` its second result, the bias's gradient."""
    columns = columns_of(program)
    gradients: dict[object, int] = {}
    for index, operator in enumerate(program.operators):
        if operator.kind == WeightGradient():
            gradients.setdefault(columns(operator.inputs[0]), index)
    operators = list(program.operators)
    gone: set[int] = set()
    for index, operator in enumerate(program.operators):
        kind = operator.kind
        if not isinstance(kind, Reduce) or kind.op != "sum" or kind.keeps_dims:
            continue
        rank = len(program.values[operator.inputs[0]].shape)
        if kind.dims != tuple(range(rank - 1)):
            continue
        at = gradients.pop(columns(operator.inputs[0]), None)
        if at is not None:
            found = operators[at]
            outputs = (*found.outputs, *operator.outputs)
            operators[at] = replace(found, kind=WeightGradient(has_bias=True), outputs=outputs)
            gone.add(index)
    if not gone:
        return program
    left = [operator for index, operator in enumerate(operators) if index not in gone]
    return replace(program, operators=_in_order(left))


def _in_order(operators: list[Operator]) -> tuple[Operator, ...]:
    """Return the operators in a valid order of execution that is close to the given one."""
    producers = {value: operator for operator in operators for value in operator.outputs}
    found: dict[tuple[ValueId, ...], Operator] = {}
    waiting = list(reversed(operators))
    while waiting:
        operator = waiting[-1]
        missing = [producers[value] for value in operator.inputs if value in producers]
        missing = [one for one in missing if one.outputs not in found]
        if missing:
            waiting += missing
        else:
            found[waiting.pop().outputs] = operator
    return tuple(found.values())
