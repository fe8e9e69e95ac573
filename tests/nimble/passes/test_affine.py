"""Scales and shifts that fold, with their signs and to the last bit; and those that must not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Concat, Convolution, Linear, MatMul, Pointwise, Step
from mlsys_nimble.ir.program import Operator, Program, ValueType
from mlsys_nimble.passes.constants import fold_constants
from mlsys_nimble.passes.folding import fold_affine
from mlsys_nimble.passes.fusion import fuse_elementwise, fuse_epilogues
from torch import Tensor, nn

FOLD = (fold_constants, fold_affine)
FUSED = (fold_constants, fuse_elementwise, fold_affine)

AFFINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x + 3,
    "constant first": lambda x: 3 + x,
    "difference": lambda x: x - 3,
    "constant minus it": lambda x: 3 - x,
    "constant minus a shifted one": lambda x: 3 - (x * 2 + 5),
    "shifted minus constant": lambda x: (x * 2 + 5) - 3,
    "product": lambda x: (x + 3) * 2,
    "constant times it": lambda x: 2 * (x - 3),
    "quotient": lambda x: (x + 3) / 2,
    "negated": lambda x: -(x * 2 + 5),
    "negated twice": lambda x: -(4 - (-(x / 3))),
    "many": lambda x: 7 - ((3 - x * 2) / 4 + 1) * -3,
}


@pytest.mark.parametrize("passes", [FOLD, FUSED], ids=["one by one", "fused"])
@pytest.mark.parametrize("form", AFFINE.values(), ids=AFFINE)
def test_every_affine_form_folds_on_both_sides(form: Callable[[Tensor], Tensor], passes: Any, rewritten: Any) -> None:
    linear = nn.Linear(4, 3)
    program = rewritten(passes, lambda x: form(linear(x)), torch.randn(2, 4))
    assert [type(operator.kind) for operator in program.operators] == [Linear]
    program = rewritten(passes, lambda x: linear(form(x)), torch.randn(2, 4))
    assert [type(operator.kind) for operator in program.operators] == [Linear]


OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "reciprocal": lambda x: 3 / (x * x + 1),
    "constant over it": lambda x: 5 / x,
    "tensor over it": lambda x: torch.tensor([5.0]) / x,
    "square": lambda x: (x + 1) * (x + 2),
    "with itself": lambda x: x + x * 2,
    "maximum": lambda x: (x + 1).clamp(min=0.25),
    "exponential": lambda x: (x / 9).exp() - 1,
    "absolute": lambda x: -(x.abs()),
}


@pytest.mark.parametrize("form", OTHER.values(), ids=OTHER)
def test_steps_that_are_no_scale_and_shift_stay(form: Callable[[Tensor], Tensor], rewritten: Any) -> None:
    linear = nn.Linear(4, 3)
    for model in (lambda x: form(linear(x)), lambda x: linear(form(x))):
        program = rewritten(FUSED, model, torch.randn(2, 4))
        assert Counter(type(operator.kind) for operator in program.operators) == {Linear: 1, Pointwise: 1}


def test_infinite_amounts_do_not_fold(rewritten: Any) -> None:
    linear = nn.Linear(4, 3)
    for form in (lambda x: x / 0.0, lambda x: x + float("inf")):
        program = capture(lambda x, form=form: form(linear(x)), (torch.randn(2, 4),)).program
        assert len(fold_affine(program).operators) == 2


def test_a_per_channel_amount_beside_one_per_row_does_not_fold(rewritten: Any) -> None:
    linear, scale, shift = nn.Linear(4, 3), torch.randn(3), torch.randn(2, 1)
    for model in (lambda x: linear(x) * scale + shift, lambda x: linear(x) * shift + scale):
        program = rewritten((fuse_elementwise, fold_affine), model, torch.randn(2, 4))
        assert Counter(type(operator.kind) for operator in program.operators) == {Linear: 1, Pointwise: 1}
    scale, shift = torch.randn(4), torch.randn(2, 1)
    for model in (lambda x: linear(x * scale + shift), lambda x: linear(x * shift + scale)):
        program = rewritten((fuse_elementwise, fold_affine), model, torch.randn(2, 4))
        assert Counter(type(operator.kind) for operator in program.operators) == {Linear: 1, Pointwise: 1}


def test_amounts_that_widen_the_result_do_not_fold(rewritten: Any) -> None:
    linear, row = nn.Linear(4, 3), torch.randn(2, 1, 1)
    program = rewritten(FOLD, lambda x: linear(x) * row, torch.randn(5, 4))
    assert Counter(type(operator.kind) for operator in program.operators) == {Linear: 1, Pointwise: 1}


@pytest.mark.parametrize(("dtype", "folds"), [("float32", True), ("float64", True), ("bfloat16", False)])
def test_half_precision_keeps_its_roundings(dtype: str, folds: bool) -> None:
    linear, x = nn.Linear(4, 3).to(getattr(torch, dtype)), torch.randn(2, 4, dtype=getattr(torch, dtype))
    for model in (lambda x: linear(x) * 3, lambda x: linear(x * 3)):
        assert (len(fold_affine(capture(model, (x,)).program).operators) == 1) == folds


def test_another_dtype_on_the_way_stays(rewritten: Any) -> None:
    linear = nn.Linear(4, 3)
    program = rewritten((fold_affine,), lambda x: linear(x).double() * 3, torch.randn(2, 4))
    assert any(isinstance(operator.kind, Pointwise) for operator in program.operators)


def test_amounts_are_computed_in_float64_and_rounded_once() -> None:
    linear, x = nn.Linear(512, 64), torch.randn(1, 512)
    weight, bias = linear.weight.detach().double(), linear.bias.detach().double()
    program = fold_affine(fuse_elementwise(capture(lambda x: (linear(x) - 0.7) * 0.1 / 3, (x,)).program))
    (operator,) = program.operators
    assert torch.equal(program.constants[operator.inputs[1]], (weight * (0.1 / 3)).float())
    assert torch.equal(program.constants[operator.inputs[2]], (bias * (0.1 / 3) - 0.7 * 0.1 / 3).float())
    program = fold_affine(fuse_elementwise(capture(lambda x: linear(x * 0.1 + 0.7), (x,)).program))
    (operator,) = program.operators
    assert torch.equal(program.constants[operator.inputs[1]], (weight * 0.1).float())
    assert torch.equal(program.constants[operator.inputs[2]], (weight * 0.7).sum(1).add(bias).float())


def test_a_row_of_channels_folds_in_front_and_behind(rewritten: Any) -> None:
    for groups, rank in ((1, 2), (3, 2), (1, 1), (2, 1), (1, 3)):
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](6, 6, 2, groups=groups, bias=groups != 2)
        amounts = torch.randn(2, 6, *(1,) * rank)
        for model in (
            lambda x, conv=conv, a=amounts: conv(x * a[0] + a[1]),
            lambda x, conv=conv, a=amounts: conv(x) * a[0] + a[1],
        ):
            program = rewritten(FOLD, model, torch.randn(2, 6, *(4,) * rank))
            assert [type(operator.kind) for operator in program.operators] == [Convolution]


def test_a_linear_over_many_dims_takes_the_last(rewritten: Any) -> None:
    linear, amount, x = nn.Linear(5, 5), torch.rand(5) + 1, torch.randn(2, 5, 5)
    for model in (lambda x: linear(x) * amount - 1, lambda x: linear(x * amount - 1)):
        assert len(rewritten(FOLD, model, x).operators) == 1
    for model in (lambda x: linear(x) * amount[:, None], lambda x: linear(x * amount[:, None])):
        assert len(rewritten(FOLD, model, x).operators) == 2, "along dimension 1, which is no column of the weight"


def test_a_row_vector_times_a_weight_is_a_linear_of_one_dim(rewritten: Any) -> None:
    linear, scale = nn.Linear(4, 3), torch.randn(3)
    program = rewritten(FOLD, lambda x: linear(x) * scale, torch.randn(4))
    assert [type(operator.kind) for operator in program.operators] == [Linear]


def test_a_shift_before_padding_stays_and_a_scale_folds(rewritten: Any) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1)
    program = rewritten(FOLD, lambda x: conv(x * 3), torch.randn(1, 3, 5, 5))
    assert [type(operator.kind) for operator in program.operators] == [Convolution]
    program = rewritten(FOLD, lambda x: conv(x + 3), torch.randn(1, 3, 5, 5))
    assert Counter(type(operator.kind) for operator in program.operators) == {Convolution: 1, Pointwise: 1}


def test_scales_fold_into_a_product_and_shifts_do_not(rewritten: Any) -> None:
    x, y = torch.randn(2, 4), torch.randn(4, 3)
    program = rewritten(FOLD, lambda x, y: (x @ y) * 0.5 / 4 * 3, x, y)
    assert [operator.kind for operator in program.operators] == [MatMul(scale=0.375)]
    for model in (lambda x, y: (x @ y) + 1, lambda x, y: (x @ y) * torch.tensor([1.0, 2.0, 3.0])):
        assert len(rewritten(FOLD, model, x, y).operators) == 2


def test_an_epilogue_stands_between_a_scale_and_the_weights(rewritten: Any) -> None:
    linear = nn.Linear(4, 4)
    passes = (fuse_epilogues, fold_affine)
    assert len(rewritten(passes, lambda x: linear(x).relu() * 3, torch.randn(2, 4)).operators) == 2
    (operator,) = rewritten(passes, lambda x: linear(x * 3 + 1).relu(), torch.randn(2, 4)).operators
    assert operator.kind.epilogue.activation == "relu"
    program = rewritten(passes, lambda x, y: linear(x * 3 + 1) + y, torch.randn(2, 4), torch.randn(2, 4))
    (operator,) = program.operators
    assert operator.kind.epilogue.has_residual, "the residual is no constant and stays the last input"
    assert len(operator.inputs) == 4


def test_one_linear_after_another_stays_two(rewritten: Any) -> None:
    one, other, conv = nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(3, 3, 1)
    for model in (lambda x: one(other(x)), lambda x: one(conv(x)), lambda x: conv(one(x))):
        assert len(rewritten(FOLD, model, torch.randn(2, 3, 4)).operators) == 2


def test_computed_weights_are_left_alone(rewritten: Any) -> None:
    args = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)
    for model in (
        lambda x, w, b: nn.functional.linear(x, w, b) * 3,
        lambda x, w, b: nn.functional.linear(x * 3, w, b),
    ):
        kinds = Counter(type(operator.kind) for operator in rewritten(FOLD, model, *args).operators)
        assert kinds[Pointwise] >= 1


# Through concatenations.


class Joined(nn.Module):
    """Three parts, of which the first and the last are convolutions, and what is done to all of them."""

    def __init__(self, tail: Callable[[Tensor], Tensor], *, dim: int = 1, twice: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 2, 1, bias=False)
        self.tail, self.dim, self.twice = tail, dim, twice

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        return self.tail(torch.cat([one, x.tanh(), one if self.twice else self.two(x)], self.dim))


def test_each_part_takes_its_own_share_of_the_channels(rewritten: Any) -> None:
    scale, shift = torch.randn(9, 1, 1), torch.randn(1, 9, 1, 1)
    program = rewritten((fuse_elementwise, fold_affine), Joined(lambda x: x * scale - shift), torch.randn(2, 3, 5, 5))
    kinds = Counter(type(operator.kind) for operator in program.operators)
    assert kinds == {Convolution: 2, Pointwise: 2, Concat: 1}
    (added,) = (
        operator
        for operator in program.operators
        if isinstance(operator.kind, Pointwise) and operator.kind.steps[0].op == "mul"
    )
    assert added.kind.steps == (Step("mul", (0, 1)), Step("add", (-1, 2)))
    amount = ValueType((3, 1, 1), "float32")
    assert [program.values[value] for value in added.inputs[1:]] == [amount, amount]
    names = [operator.name for operator in program.operators]
    assert sum(name.endswith(".folded") for name in names) == 2
    assert names[-1] == "concat", "what stands for the sum has the name of its main part"


def test_a_part_in_float64_gets_amounts_in_float64(rewritten: Any) -> None:
    linear, amount = nn.Linear(4, 3).double(), torch.rand(7, dtype=torch.float64)
    model = lambda x: torch.cat([linear(x), x.tanh()], 1) * amount  # noqa: E731
    program = rewritten((fold_affine,), model, torch.randn(2, 4, dtype=torch.float64))
    added = [operator for operator in program.operators if isinstance(operator.kind, Pointwise)][-1]
    assert added.kind.dtype == "float64"
    assert torch.equal(program.constants[added.inputs[1]], amount[3:])


def test_a_concatenation_takes_nothing_along_another_dim(rewritten: Any) -> None:
    linear, column = nn.Linear(5, 5), torch.randn(10, 1)
    model = lambda x: torch.cat([linear(x), x.tanh()], 0) * column  # noqa: E731
    program = rewritten((fold_affine,), model, torch.randn(5, 5))
    assert Counter(type(operator.kind) for operator in program.operators) == {Linear: 1, Pointwise: 2, Concat: 1}
    row = torch.randn(5)
    model = lambda x: torch.cat([linear(x), x.tanh()], 0) * row  # noqa: E731
    program = rewritten((fold_affine,), model, torch.randn(5, 5))
    assert Counter(type(operator.kind) for operator in program.operators) == {Linear: 1, Pointwise: 2, Concat: 1}


def test_a_concatenation_without_weights_or_with_a_part_twice_stays(rewritten: Any) -> None:
    model = lambda x: torch.cat([x.tanh(), x.exp()], 1) * 3  # noqa: E731
    kinds = Counter(type(operator.kind) for operator in rewritten(FOLD, model, torch.randn(2, 3)).operators)
    assert kinds == {Pointwise: 3, Concat: 1}
    program = rewritten(FOLD, Joined(lambda x: x * 3, twice=True), torch.randn(2, 3, 5, 5))
    assert Counter(type(operator.kind) for operator in program.operators) == {Convolution: 1, Pointwise: 2, Concat: 1}


def test_a_part_that_others_read_takes_its_scale_outside(rewritten: Any) -> None:
    one, two = nn.Linear(4, 3), nn.Linear(4, 2)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        shared = one(x)
        return torch.cat([shared, two(x)], 1) * 3 + 1, shared

    program = rewritten(FOLD, model, torch.randn(2, 4))
    assert Counter(type(operator.kind) for operator in program.operators)[Linear] == 2


def test_constants_of_a_call_are_not_folded(rewritten: Any) -> None:
    """The weight is a buffer that every call changes."""
    image = ValueType((2, 3), "float32")
    weight = ValueType((3, 3), "float32")
    twice = Pointwise((Step("mul", (0, 2.0)),))
    program = Program(
        (image, weight, image, image, weight),
        (
            Operator("linear", Linear(False), (0, 1), (2,)),
            Operator("twice", twice, (2,), (3,)),
            Operator("grown", twice, (1,), (4,)),
        ),
        (0,),
        (3,),
        {1: torch.randn(3, 3)},
        ((1, 4),),
    )
    assert fold_affine(program) == program
