"""Fused elementwise operators are the operators they were made of, and fuse as far as they may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Pointwise, Step
from mlsys_nimble.ir.program import Program, check_program
from mlsys_nimble.passes.fusion import MAX_STEPS, fuse_elementwise


def fused(function: Callable[..., Any], *args: torch.Tensor) -> list[Pointwise]:
    """The elementwise operators after the pass, which gives what the program gave before it."""
    program = capture(function, args).program
    changed = fuse_elementwise(program)
    check_program(changed)
    for executed in (program, changed):
        got = ReferenceExecutor(executed).run([x.clone() for x in args])
        torch.testing.assert_close(got, [function(*args)], rtol=1e-6, atol=1e-6)
    assert all(isinstance(operator.kind, Pointwise) for operator in changed.operators)
    return [operator.kind for operator in changed.operators if isinstance(operator.kind, Pointwise)]


X, Y = torch.linspace(-2, 2, 12).view(3, 4), torch.linspace(1, 3, 12).view(3, 4)


def test_the_order_of_arguments_stays():
    (kind,) = fused(lambda x, y: (x - y) / (y - x * 2), X, Y)
    assert [step.op for step in kind.steps].count("sub") == 2
    (kind,) = fused(lambda x, y: y - (x - 3), X, Y)
    assert [step.op for step in kind.steps] == ["sub", "sub"]
    assert kind.steps[0].arguments[1] == 3.0


def test_a_reader_of_one_value_twice_reads_the_fused_result_twice():
    (kind,) = fused(lambda x, y: (z := x - y) * z, X, Y)
    assert kind.steps == (Step("sub", (0, 1)), Step("mul", (-1, -1)))


def test_a_reader_of_several_steps_reads_the_last_of_them():
    (kind,) = fused(lambda x, y: torch.threshold(x, 0.5, 2.0) - y, X, Y)
    assert kind.steps == (Step("le", (0, 0.5)), Step("where", (-1, 2.0, 0)), Step("sub", (-2, 1)))


def test_comparisons_join_but_a_cast_to_bool_does_not():
    (kind,) = fused(lambda x, y: torch.where(x > y, x, y * 2), X, Y)
    assert [step.op for step in kind.steps][-1] == "where"
    program = capture(lambda x, y: torch.where((x - y).to(torch.bool), x, y), (X, Y)).program
    assert any(not isinstance(operator.kind, Pointwise) for operator in fuse_elementwise(program).operators)


@pytest.mark.parametrize("count", [MAX_STEPS - 1, MAX_STEPS, MAX_STEPS + 1])
def test_a_chain_is_cut_where_it_is_too_long(count: int):
    def chain(x: torch.Tensor) -> torch.Tensor:
        for index in range(count):
            x = x + index
        return x

    kinds = fused(chain, X)
    assert max(len(kind.steps) for kind in kinds) == min(count, MAX_STEPS)
    assert len(kinds) == (2 if count > MAX_STEPS else 1)


def test_other_shapes_and_dtypes_are_not_taken_in():
    program = fuse_elementwise(capture(lambda x, y: (x.double() * 2).float() + y, (X, Y)).program)
    dtypes = {operator.kind.dtype for operator in program.operators if isinstance(operator.kind, Pointwise)}
    assert dtypes == {"float64", "float32"}


@pytest.mark.parametrize("function", [lambda x: x * x.sigmoid(), lambda x: x.sigmoid() * x])
def test_silu_is_found_either_way_round(function: Any):
    (kind,) = fused(function, X)
    assert kind.steps == (Step("silu", (0,)),)


def test_steps_that_only_resemble_silu_stay():
    (other,) = fused(lambda x, y: x.sigmoid() * y, X, Y)
    (squared,) = fused(lambda x: x.sigmoid().square(), X)
    (longer,) = fused(lambda x: x.sigmoid() * x + 1, X)
    assert [step.op for step in other.steps] == ["sigmoid", "mul"]
    assert [step.op for step in squared.steps] == ["sigmoid", "square"]
    assert [step.op for step in longer.steps] == ["sigmoid", "mul", "add"]


OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sub": lambda x, y: x - y,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x < y, x * 2, y),
    "tanh": lambda x, y: x.tanh(),
    "number minus": lambda x, y: 2 - y,
    "row": lambda x, y: x - y[:1],
}


@settings(max_examples=60, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=9))
def test_any_diagram_gives_what_it_gave(steps: list[tuple[str, int, int]]):
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values = [x, y]
        for name, one, other in steps:
            values.append(OPS[name](values[one % len(values)], values[other % len(values)]))
        return values[-1]

    program: Program = capture(run, (X, Y)).program
    changed = fuse_elementwise(program)
    check_program(changed)
    assert len(changed.operators) <= len(program.operators)
    got = ReferenceExecutor(changed).run([X.clone(), Y.clone()])
    torch.testing.assert_close(got, [run(X, Y)], rtol=1e-6, atol=1e-6)
