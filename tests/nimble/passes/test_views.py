"""Views, parts of a whole, and operators that change nothing: each rule where it holds, and just beside it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import (
    Cast,
    Concat,
    Copy,
    Expand,
    Kind,
    Pad,
    Permute,
    Pointwise,
    Reduce,
    Reshape,
    Slice,
    Step,
)
from mlsys_nimble.ir.program import Operator, Program, ValueType, check_program
from mlsys_nimble.passes.constants import remove_dead_code
from mlsys_nimble.passes.views import simplify_views

SIMPLIFY = (simplify_views, remove_dead_code)
TWICE = Pointwise((Step("mul", (0, 2.0)),))
Shape = tuple[int, ...]


def chain(start: Shape, *steps: tuple[Kind, Shape], ends_in: Kind | None = TWICE) -> Program:
    """Operators of one input each, and at their end one whose result is the caller's."""
    shapes = [start, *(shape for _, shape in steps)]
    kinds = [kind for kind, _ in steps]
    if ends_in is not None:
        shapes, kinds = [*shapes, shapes[-1]], [*kinds, ends_in]
    values = tuple(ValueType(shape, "float32") for shape in shapes)
    operators = tuple(Operator(f"op{i}", kind, (i,), (i + 1,)) for i, kind in enumerate(kinds))
    return Program(values, operators, (0,), (len(kinds),))


def kinds_of(program: Program) -> list[Kind]:
    return [operator.kind for operator in program.operators]


@pytest.mark.parametrize(
    ("start", "steps", "expected"),
    [
        pytest.param((2, 3), [(Reshape(), (2, 3))], [], id="a reshape to the same shape"),
        pytest.param((2, 3), [(Reshape(), (6,)), (Reshape(), (3, 2))], [Reshape()], id="reshape of a reshape"),
        pytest.param((2, 3), [(Reshape(), (6,)), (Reshape(), (2, 3))], [], id="reshape and back"),
        pytest.param((2, 3), [(Permute((0, 1)), (2, 3))], [], id="a permutation that keeps the order"),
        pytest.param((2, 3), [(Permute((1, 0)), (3, 2))], [Permute((1, 0))], id="a permutation alone"),
        pytest.param(
            (2, 3, 4), [(Permute((1, 2, 0)), (3, 4, 2)), (Permute((1, 2, 0)), (4, 2, 3))], [Permute((2, 0, 1))]
        ),
        pytest.param((2, 3, 4), [(Permute((1, 2, 0)), (3, 4, 2)), (Permute((2, 0, 1)), (2, 3, 4))], [], id="and back"),
        pytest.param((6, 2), [(Slice(0, 0), (6, 2))], [], id="all of it"),
        pytest.param((6, 2), [(Slice(0, 1), (5, 2)), (Slice(0, 2), (3, 2))], [Slice(0, 3)], id="slice of a slice"),
        pytest.param((9, 2), [(Slice(0, 1, 2), (4, 2)), (Slice(0, 1, 3), (1, 2))], [Slice(0, 3, 6)], id="steps"),
        pytest.param((6, 2), [(Slice(0, 1), (5, 2)), (Slice(1, 1), (5, 1))], [Slice(0, 1), Slice(1, 1)], id="dims"),
        pytest.param((1, 2), [(Expand(), (1, 2))], [], id="an expand to the same shape"),
        pytest.param((1, 2), [(Expand(), (3, 2)), (Expand(), (4, 3, 2))], [Expand()], id="expand of an expand"),
        pytest.param((2, 3), [(Cast(), (2, 3))], [], id="a cast to the same dtype"),
        pytest.param((2, 3), [(Pad(((0, 0), (0, 0))), (2, 3))], [], id="a border of nothing"),
        pytest.param((2, 3), [(Concat(0), (2, 3))], [], id="a concatenation of one"),
        pytest.param((2, 3), [(Copy(), (2, 3))], [], id="a copy"),
        pytest.param(
            (2, 3, 4, 5), [(Reduce("mean", (2, 3), True), (2, 3, 1, 1)), (Reshape(), (2, 3))],
            [Reduce("mean", (2, 3), False)], id="pooled and flattened"
        ),
        pytest.param(
            (2, 1, 4), [(Reduce("mean", (2,), True), (2, 1, 1)), (Reshape(), (2,))],
            [Reduce("mean", (2,), True), Reshape()], id="more than the reduced dims dropped"
        ),
        pytest.param(
            (2, 4), [(Reduce("mean", (1,), False), (2,)), (Reshape(), (1, 2))],
            [Reduce("mean", (1,), False), Reshape()], id="dropped before"
        ),
    ],
)  # fmt: skip
def test_one_rule(start: Shape, steps: Any, expected: list[Kind], rewritten: Any) -> None:
    program = rewritten(SIMPLIFY, chain(start, *steps), torch.randn(start))
    assert kinds_of(program) == [*expected, TWICE]


def test_a_border_that_shifts_stays_though_the_shape_is_the_same(rewritten: Any) -> None:
    shift = Pad(((1, -1), (0, 0)))
    program = rewritten(SIMPLIFY, chain((3, 2), (shift, (3, 2))), torch.randn(3, 2))
    assert kinds_of(program) == [shift, TWICE]


def test_a_cast_to_another_dtype_stays(rewritten: Any) -> None:
    values = (ValueType((2,), "float32"), ValueType((2,), "float64"), ValueType((2,), "float64"))
    half = Operator("twice", Pointwise((Step("mul", (0, 2.0)),), "float64"), (1,), (2,))
    program = Program(values, (Operator("cast", Cast(), (0,), (1,)), half), (0,), (2,))
    assert rewritten(SIMPLIFY, program, torch.randn(2)) == program


@pytest.mark.parametrize("kind", [Cast(), Pad(((0, 0), (0, 0))), Concat(0)])
def test_a_result_of_the_caller_stays_a_copy(kind: Kind, rewritten: Any) -> None:
    program = rewritten(SIMPLIFY, chain((2, 3), (kind, (2, 3)), ends_in=None), torch.randn(2, 3))
    assert kinds_of(program) == [Copy()]
    x = torch.zeros(2, 3)
    ReferenceExecutor(program).run([x])[0].add_(1)
    assert x.sum() == 0


def test_the_rewrites_go_on_after_a_rule_that_does_not_hold(rewritten: Any) -> None:
    shift = Pad(((1, -1), (0, 0)))
    steps = [(shift, (4, 2)), (Slice(0, 1), (3, 2)), (Slice(0, 1), (2, 2)), (Copy(), (2, 2)), (Reshape(), (4,))]
    program = rewritten(SIMPLIFY, chain((4, 2), *steps), torch.randn(4, 2))
    assert kinds_of(program) == [shift, Slice(0, 2), Reshape(), TWICE]


# Parts of a concatenation.


def joined(cut: Slice, length: int, *sizes: int, dim: int = 0) -> Program:
    """A slice of parts of these sizes, and something that is done to it."""
    shapes = [(size, 2) for size in sizes]
    whole = (sum(sizes), 2)
    part = (length, 2) if cut.dim == 0 else (sum(sizes), length)
    values = tuple(ValueType(shape, "float32") for shape in (*shapes, whole, part, part))
    n = len(sizes)
    operators = (
        Operator("cat", Concat(dim), tuple(range(n)), (n,)),
        Operator("cut", cut, (n,), (n + 1,)),
        Operator("twice", TWICE, (n + 1,), (n + 2,)),
    )
    return Program(values, operators, tuple(range(n)), (n + 2,))


@pytest.mark.parametrize(
    ("cut", "length", "kept", "of"),
    [
        (Slice(0, 0), 3, [], 0),  # just the first part
        (Slice(0, 3), 4, [], 1),  # just the second
        (Slice(0, 7), 2, [], 2),  # just the last
        (Slice(0, 0), 2, [Slice(0, 0)], 0),  # its beginning
        (Slice(0, 4), 3, [Slice(0, 1)], 1),  # its end
        (Slice(0, 3, 2), 2, [Slice(0, 0, 2)], 1),  # every other row of it
        (Slice(0, 3, 3), 2, [Slice(0, 0, 3)], 1),  # its first and last row
        (Slice(0, 8), 1, [Slice(0, 1)], 2),
        (Slice(0, 2), 2, None, None),  # over a border
        (Slice(0, 0, 2), 3, None, None),  # every other row, over a border
        (Slice(0, 3, 2), 3, None, None),
        (Slice(0, 0), 8, None, None),
        (Slice(1, 1), 1, None, None),  # along another dim
    ],
)
def test_a_part_of_a_concatenation_is_read_where_it_comes_from(
    cut: Slice, length: int, kept: list[Kind] | None, of: int | None, rewritten: Any
) -> None:
    program = joined(cut, length, 3, 4, 2)
    changed = rewritten(SIMPLIFY, program, torch.randn(3, 2), torch.randn(4, 2), torch.randn(2, 2))
    if kept is None:
        assert changed == program
    else:
        assert kinds_of(changed) == [*kept, TWICE]
        assert changed.operators[0].inputs == (of,)


def test_an_empty_part_is_no_part(rewritten: Any) -> None:
    program = joined(Slice(0, 3), 0, 3, 4)
    assert rewritten(SIMPLIFY, program, torch.randn(3, 2), torch.randn(4, 2)) == program


def test_a_callers_slice_of_a_concatenation_is_cut_from_it(rewritten: Any) -> None:
    program = joined(Slice(0, 3), 4, 3, 4)
    program = Program(program.values, program.operators[:2], program.inputs, (3,))
    assert rewritten(SIMPLIFY, program, torch.randn(3, 2), torch.randn(4, 2)) == program


def test_concatenations_join_where_nobody_else_reads_the_inner_one(rewritten: Any) -> None:
    args = torch.randn(2, 3), torch.randn(2, 1)

    def parts_of(model: Any, *inputs: torch.Tensor) -> list[int]:
        program = rewritten(SIMPLIFY, model, *inputs)
        return [len(operator.inputs) for operator in program.operators if isinstance(operator.kind, Concat)]

    assert parts_of(lambda x, y: torch.cat([y, torch.cat([x, y * 2], 1), x], 1), *args) == [4]
    assert sorted(parts_of(lambda x, y: torch.cat([torch.cat([x, x * 2], 0), x], 0), *args)) == [3]
    assert sorted(parts_of(lambda x, y: torch.cat([torch.cat([x, x * 2], 1).view(4, 3), x], 0), *args)) == [2, 2]

    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner = torch.cat([x, y], 1)
        return torch.cat([inner, inner], 1)

    def shared(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = torch.cat([x, y], 1)
        return torch.cat([inner, x], 1), inner * 2

    def across(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner = torch.cat([x, y], 1)
        return torch.cat([inner, inner * 2], 0).exp()

    assert sorted(parts_of(twice, *args)) == [2, 2]
    assert sorted(parts_of(shared, *args)) == [2, 2]
    assert sorted(parts_of(across, *args)) == [2, 2]


def test_empty_parts_are_left_out(rewritten: Any) -> None:
    shapes = [(2, 3), (0, 3), (1, 3), (3, 3)]
    values = tuple(ValueType(shape, "float32") for shape in shapes)
    program = Program(values, (Operator("cat", Concat(0), (0, 1, 2), (3,)),), (0, 1, 2), (3,))
    changed = rewritten(SIMPLIFY, program, *(torch.randn(shape) for shape in shapes[:3]))
    assert changed.operators[0].inputs == (0, 2)
    values = tuple(ValueType(shape, "float32") for shape in [(0, 3), (0, 3), (0, 3)])
    empty = Program(values, (Operator("cat", Concat(0), (0, 1), (2,)),), (0, 1), (2,))
    assert rewritten(SIMPLIFY, empty, torch.randn(0, 3), torch.randn(0, 3)) == empty


# Expanded inputs of elementwise operators.


@pytest.mark.parametrize(
    ("model", "num_expands"),
    [
        (lambda x, y: x + y.expand(4, 3), 0),
        (lambda x, y: y.expand(4, 3) + x, 0),
        (lambda x, y: y.expand(4, 3) * y.expand(4, 3), 1),  # one of them is to give the shape
        (lambda x, y: y.expand(4, 3).exp(), 1),
        (lambda x, y: torch.where(x > 0, y.expand(4, 3), x), 0),
        (lambda x, y: torch.where(y.expand(4, 3) > 0, y.expand(4, 3), x[:1].expand(4, 3)), 1),
    ],
)
def test_elementwise_operators_broadcast_by_themselves(model: Any, num_expands: int, rewritten: Any) -> None:
    program = rewritten(SIMPLIFY, model, torch.randn(4, 3), torch.randn(1, 3))
    assert Counter(type(kind) for kind in kinds_of(program))[Expand] == num_expands


# Any diagram of views.

MOVES: dict[str, Any] = {
    "transpose": lambda x: x.transpose(0, 1),
    "flatten": lambda x: x.reshape(-1, 2) if x.numel() % 2 == 0 else x.reshape(1, -1),
    "rows": lambda x: x[1:] if x.shape[0] > 1 else x,
    "every other": lambda x: x[:, ::2],
    "last": lambda x: x[:, -1:],
    "double": lambda x: torch.cat([x, x * 2], 0),
    "beside": lambda x: torch.cat([x, x.exp(), x], 1)[:, 1:],
    "second half": lambda x: torch.cat([x + 1, x], 0)[x.shape[0] :],
    "spread": lambda x: x + x[:1].expand(x.shape[0], x.shape[1]),
    "copy": lambda x: x.clone(),
    "scale": lambda x: x * 0.5,
    "mean": lambda x: x.mean(1, keepdim=True).flatten(0).view(1, -1),
    "none": lambda x: x[0:0] if x.shape[0] > 5 else x,
}


@settings(max_examples=80, derandomize=True)
@given(st.lists(st.sampled_from(sorted(MOVES)), min_size=2, max_size=7))
def test_any_chain_of_views_gives_what_it_gave(moves: list[str]) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        for name in moves:
            x = MOVES[name](x)
        return x

    x = torch.arange(12.0).view(3, 4) / 7
    program = capture(run, (x,)).program
    changed = remove_dead_code(simplify_views(program))
    check_program(changed)
    assert len(changed.operators) <= len(program.operators)
    torch.testing.assert_close(ReferenceExecutor(changed).run([x.clone()]), [run(x)])
