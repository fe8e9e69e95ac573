"""The smaller passes: operators that they fold, share, fuse and leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Epilogue, Pointwise, Step
from mlsys_nimble.ir.program import Operator, Program, ValueType
from mlsys_nimble.passes import PASSES, optimise
from mlsys_nimble.passes.constants import MAX_GROWN_NBYTES, fold_constants, remove_dead_code, share_subexpressions
from mlsys_nimble.passes.fusion import MAX_INPUTS, fuse_elementwise, fuse_epilogues
from torch import nn
from torch.nn.functional import elu, leaky_relu, linear, max_pool2d

from tests.nimble.passes.conftest import ADD, NEGATED, ROW, TWICE, kinds_of, program_of

# Constants.


def test_chains_of_constants_fold_and_others_stay(rewritten: Any) -> None:
    table = torch.randn(4, 4)
    model = lambda x: (table.exp() * 2).softmax(-1)[0] + x.exp() + table.sum(0)  # noqa: E731
    assert kinds_of(rewritten((fold_constants,), model, torch.randn(4))) == ["Pointwise"] * 3


@pytest.mark.parametrize(("grown", "num_left"), [(0, 1), (1, 2)])
def test_a_result_may_be_as_large_as_the_bound_or_its_inputs(grown: int, num_left: int, rewritten: Any) -> None:
    size = MAX_GROWN_NBYTES // 4 + grown
    table = torch.randn(1)
    program = rewritten((fold_constants,), lambda x: table.expand(size) * x, torch.randn(size))
    assert len(program.operators) == num_left
    large = torch.randn(size)
    program = rewritten((fold_constants,), lambda x: (large * 2) * x, torch.randn(size))
    assert len(program.operators) == 1, "no larger than what it is made from"


def test_several_results_of_constants_fold_together(rewritten: Any) -> None:
    table = torch.tensor([3.0, 1.0, 2.0, 5.0])

    def model(x: torch.Tensor) -> torch.Tensor:
        values, indices = table.sort()
        return x * values + indices

    program = rewritten((fold_constants,), model, torch.randn(4))
    assert kinds_of(program) == ["Pointwise"] * len(program.operators)


def test_folded_results_of_a_call_are_copies_and_the_others_go_on(rewritten: Any) -> None:
    table = torch.randn(4)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, _ = table.sort()
        return table.exp(), table.clone(), values, x * (table * 2)

    program = rewritten((fold_constants,), model, torch.randn(4))
    assert sorted(kinds_of(program)) == ["Aten", "Copy", "Copy", "Pointwise"]


def test_a_tensor_that_a_call_changes_is_no_constant(rewritten: Any) -> None:
    grow, read = Operator("grow", TWICE, (1,), (2,)), Operator("read", NEGATED, (1,), (3,))
    program = program_of(grow, read, constants={1: torch.ones(4)}, mutations=((1, 2),))
    assert fold_constants(program) == program


# Dead code.


def test_unread_operators_are_removed_with_their_constants() -> None:
    operators = (
        Operator("dead", ADD, (0, 1), (3,)),
        Operator("deader", TWICE, (3,), (4,)),
        Operator("live", ADD, (0, 2), (5,)),
        Operator("stored", TWICE, (0,), (6,)),
    )
    constants = {1: torch.ones(4), 2: torch.zeros(4), 7: torch.ones(4), 8: torch.zeros(4)}
    program = Program((ROW,) * 9, operators, (0,), (5, 8), constants, ((7, 6),))
    left = remove_dead_code(program)
    assert [operator.name for operator in left.operators] == ["live", "stored"]
    assert sorted(left.constants) == [2, 7, 8]
    assert (left.inputs, left.outputs, left.mutations, left.values) == ((0,), (5, 8), ((7, 6),), program.values)


# Common subexpressions.


def test_only_equal_operators_of_equal_values_are_shared(rewritten: Any) -> None:
    def count(model: Any) -> int:
        return len(rewritten((share_subexpressions,), model, torch.rand(3, 3) + 1, torch.rand(3, 3) + 1).operators)

    assert count(lambda x, y: x.exp() * 2 + x.exp() * 2) == 3
    assert count(lambda x, y: x.exp() + y.exp()) == 3
    assert count(lambda x, y: x.exp() + x.sin()) == 3
    assert count(lambda x, y: x * 2 + x * 3) == 3
    assert count(lambda x, y: (x - y) + (y - x)) == 3
    assert count(lambda x, y: x.sum(0) + x.sum(1)) == 3
    assert count(lambda x, y: x[:2].exp() + x[1:].exp()) == 5
    assert count(lambda x, y: x.reshape(9).sum() + x.reshape(1, 9).sum() + x.reshape(9).sum()) == 6


def test_operators_whose_results_differ_in_type_are_not_shared() -> None:
    values = (ROW, ROW, ValueType((4,), "float64"), ROW)
    operators = (
        Operator("narrow", TWICE, (0,), (1,)),
        Operator("wide", TWICE, (0,), (2,)),
        Operator("sum", ADD, (1, 2), (3,)),
    )
    program = program_of(*operators, values=values)
    assert share_subexpressions(program) == program


def test_operators_of_several_results_stay_and_the_search_goes_on(rewritten: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        copied = x.clone() + torch.rand(4)
        (one, first), (other, second) = x.sort(), x.sort()
        return copied * 0 + one + other + first + second + x.exp() + x.exp()

    program = share_subexpressions(capture(model, (torch.randn(4),)).program)
    assert sum("exp" in operator.name for operator in program.operators) == 1
    assert sum("sort" in operator.name for operator in program.operators) == 2


# Elementwise.


@pytest.mark.parametrize("count", [MAX_INPUTS, MAX_INPUTS + 1])
def test_fusion_stops_at_the_largest_number_of_inputs(count: int, rewritten: Any) -> None:
    program = rewritten((fuse_elementwise,), lambda *xs: sum(xs[1:], xs[0]), *(torch.randn(3) for _ in range(count)))
    assert len(program.operators) == (1 if count == MAX_INPUTS else 2)


def test_a_truth_is_taken_in_and_a_number_cast_to_bool_is_not(rewritten: Any) -> None:
    """A bool stores 0.5 as 1, so the step after it must not see 0.5."""
    bools = (ROW, ROW, ValueType((4,), "bool"), ROW)
    for op, arguments, expected in (("sub", (0, 1), 2), ("lt", (0, 1), 1), ("logical_and", (0, 1), 1)):
        first = Operator("first", Pointwise((Step(op, arguments),)), (0, 1), (2,))
        second = Operator("second", TWICE, (2,), (3,))
        program = program_of(first, second, inputs=(0, 1), values=bools)
        assert len(rewritten((fuse_elementwise,), program, torch.randn(4), torch.randn(4)).operators) == expected


def test_one_that_does_not_fit_does_not_keep_the_others_out(rewritten: Any) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(y.exp() > 0, x.tanh(), x.softmax(0)) + x.sin()

    kinds = kinds_of(rewritten((fuse_elementwise,), model, torch.randn(3, 4), torch.randn(4)))
    assert kinds.count("Pointwise") == 2, "exp of the small one; all else together"
    assert kinds.count("Softmax") == 1


# Epilogues.


class Heads(nn.Module):
    """A convolution, a linear and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 3, 1), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu() + self.conv(x)
        return elu(max_pool2d(y, 3, 1, 1), 0.3) + x


def test_epilogues_of_each_kind_and_their_slopes(rewritten: Any) -> None:
    program = rewritten((fuse_epilogues,), Heads(), torch.randn(1, 3, 5, 5))
    assert sorted(kinds_of(program)) == ["Convolution", "Linear", "Pool"]
    (pool,) = (operator.kind for operator in program.operators if type(operator.kind).__name__ == "Pool")
    assert (pool.epilogue.activation, pool.epilogue.slope) == ("elu", 0.3)
    weight = torch.randn(4, 4)
    for tail, slope in ((lambda y: leaky_relu(y, 0.25), 0.25), (lambda y: y.relu(), 0.0)):
        (operator,) = rewritten((fuse_epilogues,), lambda x, t=tail: t(linear(x, weight)), torch.randn(2, 4)).operators
        assert operator.kind.epilogue.slope == slope


def test_the_same_value_added_to_itself_is_no_residual(rewritten: Any) -> None:
    weight = torch.randn(4, 4)
    model = lambda x: (y := linear(x, weight)) + y  # noqa: E731
    assert kinds_of(rewritten((fuse_epilogues,), model, torch.randn(2, 4))) == ["Linear", "Pointwise"]


def test_steps_that_an_epilogue_cannot_hold_stay(rewritten: Any) -> None:
    weight, x = torch.randn(4, 4), torch.randn(2, 4)
    models = [
        lambda x: linear(x, weight).relu().tanh(),
        lambda x: linear(x, weight).exp(),
        lambda x: linear(x, weight) * x,
        lambda x: linear(x, weight) + 3,
        lambda x: linear(x, weight) - x,
        lambda x: (linear(x, weight) + x) + x.exp(),
        lambda x: (linear(x, weight).relu() + x).relu(),
        lambda x: linear(x, weight).double().relu(),
    ]
    for model in models:
        kinds = kinds_of(rewritten((fuse_epilogues,), model, x))
        assert kinds.count("Linear") == 1
        assert len(kinds) > 1


def test_one_that_does_not_fit_does_not_end_the_search(rewritten: Any) -> None:
    weight, row = torch.randn(4, 4), torch.randn(1, 4)
    models = [
        lambda x: linear(linear(x, weight) + row, weight).relu(),  # of another shape
        lambda x: linear((y := linear(x, weight)) + y, weight).relu(),  # one value twice
        lambda x: linear(linear(x, weight).double().relu().float(), weight).relu(),  # of another dtype
    ]
    for model in models:
        program = rewritten((fuse_epilogues,), model, torch.randn(2, 4))
        assert program.operators[-1].kind.epilogue == Epilogue("relu")


def test_the_later_of_two_added_operators_takes_the_other(rewritten: Any) -> None:
    one, other = torch.randn(4, 4), torch.randn(4, 4)
    for model in (
        lambda x: linear(x, one) + linear(x, other),
        lambda x: torch.add(input=linear(x, one), other=linear(x, other)),
    ):
        first, second = rewritten((fuse_epilogues,), model, torch.randn(2, 4)).operators
        assert second.kind.epilogue == Epilogue(has_residual=True)
        assert second.inputs == (0, second.inputs[1], first.outputs[0])
        assert first.inputs[1] < second.inputs[1], "in the order they are made"
        assert second.name != "add"


def test_where_the_later_cannot_the_earlier_takes_the_other(rewritten: Any) -> None:
    one, other = torch.randn(4, 4), torch.randn(4, 4)

    def beside_a_function(x: torch.Tensor) -> torch.Tensor:
        y = linear(x, one)
        return y + x.exp()

    def beside_a_full_one(x: torch.Tensor) -> torch.Tensor:
        y = linear(x, one)
        return y + (linear(x, other) + x)

    for model, kinds in ((beside_a_function, ["Pointwise", "Linear"]), (beside_a_full_one, ["Linear", "Linear"])):
        program = rewritten((fuse_epilogues,), model, torch.randn(2, 4))
        assert kinds_of(program) == kinds
        assert program.operators[-1].kind.epilogue.has_residual


# All of them.


def test_the_report_counts_before_and_after_each_pass() -> None:
    program = capture(lambda x: (x.clone() * 2 + 1).relu(), (torch.randn(3),)).program
    changed, reports = optimise(program)
    counts = [len(program.operators), *(report.num_operators_after for report in reports)]
    assert [report.num_operators_before for report in reports] == counts[:-1]
    assert counts[-1] == len(changed.operators) == 1
    assert [report.name for report in reports] == [each.__name__ for each in PASSES]
    again, none = optimise(program, ())
    assert (again, none) == (program, ())
