"""Each pass leaves what a program computes as it is, and removes what it is for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Convolution, Copy, Linear, Pointwise, Separable
from mlsys_nimble.ir.program import Program, check_program
from mlsys_nimble.passes import PASSES, Pass, optimise
from mlsys_nimble.passes.constants import fold_constants, remove_dead_code, share_subexpressions
from mlsys_nimble.passes.folding import fold_affine, fold_borders
from mlsys_nimble.passes.fusion import fuse_elementwise, fuse_epilogues
from mlsys_nimble.passes.views import simplify_views
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, leaky_relu, max_pool2d, pad, relu, silu

from tests.nimble.passes.conftest import rewrite as after


def kinds_after(passes: tuple[Pass, ...], model: Any, *args: torch.Tensor) -> Counter[str]:
    """Count the kinds left after the passes, each of which is run before and after on fresh inputs."""
    return Counter(type(operator.kind).__name__ for operator in after(passes, model, *args).operators)


def trained_batch_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.bias):
            tensor.normal_()
        for tensor in (norm.running_var, norm.weight):
            tensor.uniform_(0.5, 2)
    return norm


FOLD = (fold_constants, fold_affine)


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_folds_into_the_convolution_before_it(groups: int):
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=groups, bias=groups == 2), trained_batch_norm(6))
    assert kinds_after(FOLD, model, torch.randn(2, 4, 5, 5)) == {"Convolution": 1}


@pytest.mark.parametrize(("padding", "expected"), [(0, {"Convolution": 1}), (1, {"Convolution": 1, "Pointwise": 1})])
def test_batch_norm_folds_into_the_convolution_after_it_unless_padding_would_show(padding: int, expected: Any):
    model = nn.Sequential(trained_batch_norm(4), nn.Conv2d(4, 6, 3, padding=padding, groups=2))
    assert kinds_after(FOLD, model, torch.randn(2, 4, 5, 5)) == expected


def test_batch_norm_folds_through_a_concatenation_into_those_parts_that_take_it():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.norm = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 2, 1), trained_batch_norm(9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.cat([self.one(x), torch.tanh(x), self.two(x)], 1))

    program = after(FOLD, Model(), torch.randn(1, 3, 5, 5))
    assert Counter(type(o.kind).__name__ for o in program.operators) == {"Convolution": 2, "Pointwise": 2, "Concat": 1}
    assert max(program.values[o.outputs[0]].shape[1] for o in program.operators if isinstance(o.kind, Pointwise)) == 3


def test_batch_norm_without_a_neighbour_is_one_elementwise_operator():
    assert kinds_after(FOLD, trained_batch_norm(4), torch.randn(2, 4, 5, 5)) == {"Pointwise": 1}


def test_batch_norm_does_not_fold_into_what_others_read():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), trained_batch_norm(4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.conv(x)
            return self.norm(y), y

    assert kinds_after(FOLD, Model(), torch.randn(1, 3, 5, 5)) == {"Convolution": 1, "Pointwise": 1}


@pytest.mark.parametrize(
    ("tail", "activation", "has_residual", "activates_first"),
    [
        pytest.param(lambda y, x: relu(y), "relu", False, False, id="activation"),
        pytest.param(lambda y, x: y + x, None, True, False, id="residual"),
        pytest.param(lambda y, x: silu(x + y), "silu", True, False, id="residual, then activation"),
        pytest.param(lambda y, x: leaky_relu(y, 0.2) + x, "leaky_relu", True, True, id="activation, then residual"),
    ],
)
def test_residuals_and_activations_become_epilogues(
    tail: Any, activation: Any, has_residual: Any, activates_first: Any
):
    for main, x in ((nn.Conv2d(4, 4, 3, padding=1), torch.randn(1, 4, 5, 5)), (nn.Linear(5, 5), torch.randn(2, 5))):
        program = after((fuse_epilogues,), lambda x, main=main: tail(main(x), x), x)
        (kind,) = (operator.kind for operator in program.operators)
        assert isinstance(kind, Convolution | Linear)
        found = kind.epilogue
        assert (found.activation, found.has_residual, found.activates_first) == (
            activation,
            has_residual,
            activates_first,
        )


def test_a_broadcast_residual_is_no_epilogue():
    conv = nn.Conv2d(4, 4, 1)
    kinds = kinds_after((fuse_epilogues,), lambda x, y: conv(x) + y, torch.randn(1, 4, 5, 5), torch.randn(1, 4, 1, 1))
    assert kinds == {"Convolution": 1, "Pointwise": 1}


def test_elementwise_chains_and_diamonds_become_one_operator():
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = torch.exp(x * y)
        return torch.where(a > 1, a, y - a) * torch.sigmoid(a)

    assert kinds_after((fuse_elementwise,), model, torch.randn(3, 4), torch.randn(4)) == {"Pointwise": 1}


def test_elementwise_work_is_not_done_twice():
    def broadcast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(y) + x  # exp of the small one, not of the large

    def read_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = torch.exp(x)
        return torch.cat([a + 1, (a * 2).flip(0)])

    for model in (broadcast, read_twice):
        kinds = kinds_after((fuse_elementwise,), model, torch.randn(3, 4), torch.randn(4))
        assert kinds["Pointwise"] == (2 if model is broadcast else 3)


BORDERS = (fold_borders, remove_dead_code)


@pytest.mark.parametrize("stride", [1, 2])
def test_borders_and_cuts_become_padding(stride: int):
    conv, x = nn.Conv2d(3, 4, 3, stride=stride, padding=1), torch.randn(1, 3, 9, 8)
    assert kinds_after(BORDERS, lambda x: conv(pad(x, (1, 0, 1, 0)))[:, :, 1:, 1:], x) == {"Convolution": 1}
    assert kinds_after(BORDERS, lambda x: conv(pad(x, (2, 3, -1, 0)))[:, :, :-1, 1:2], x)["Slice"] == 0
    assert kinds_after(BORDERS, lambda x: max_pool2d(pad(x, (1, 0, 1, 0)), 3, 2, 1)[:, :, 1:, 1:], x) == {"Pool": 1}
    assert kinds_after(BORDERS, lambda x: avg_pool2d(x, 3, stride, 1, False, False)[:, :, 1:-1], x) == {"Pool": 1}


def test_handwritten_silu_joins_the_convolution():
    conv = nn.Conv2d(3, 4, 1)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = conv(x)
        return y * torch.sigmoid(y)

    (operator,) = after((fuse_elementwise, fuse_epilogues), model, torch.randn(1, 3, 4, 4)).operators
    assert isinstance(operator.kind, Convolution)
    assert operator.kind.epilogue.activation == "silu"


def test_equal_operators_run_once_but_results_stay_apart():
    assert kinds_after((share_subexpressions,), lambda x: x.exp() + x.exp(), torch.randn(3)) == {"Pointwise": 2}
    assert kinds_after((share_subexpressions,), lambda x: (x.exp(), x.exp()), torch.randn(3)) == {"Pointwise": 2}
    assert kinds_after((share_subexpressions,), lambda x: (x.clone(), x.clone()), torch.randn(3)) == {"Copy": 2}


def test_random_numbers_are_neither_shared_nor_folded():
    model = capture(lambda x: x + torch.rand(3) + torch.rand(3), (torch.zeros(3),)).program
    program, _ = optimise(model)
    assert sum("rand" in str(operator.kind) for operator in program.operators) == 2


def test_constants_that_a_call_changes_do_not_fold():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * (self.count + 1)
            self.count += 1
            return y

    executor = ReferenceExecutor(optimise(capture(Model(), (torch.ones(2),)).program)[0])
    assert [executor.run([torch.ones(2)])[0][0].item() for _ in range(3)] == [1, 2, 3]


def test_a_constant_result_is_the_callers_own():
    executor = ReferenceExecutor(optimise(capture(lambda x: (x, torch.zeros(2)), (torch.ones(2),)).program)[0])
    executor.run([torch.ones(2)])[1].add_(5)
    assert executor.run([torch.ones(2)])[1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(lambda x: x.view(24).view(2, 12).reshape(4, 6) + 1, {"Reshape": 1}, id="reshapes"),
        pytest.param(lambda x: x.view(24).view(2, 3, 4) + 1, {}, id="reshape and back"),
        pytest.param(lambda x: x.permute(1, 2, 0).permute(2, 0, 1) + 1, {}, id="permute and back"),
        pytest.param(lambda x: x.permute(1, 2, 0).transpose(0, 1) + 1, {"Permute": 1}, id="permutes"),
        pytest.param(lambda x: x[:, :, 1:][:, :, 1:] + 1, {"Slice": 1}, id="slices"),
        pytest.param(lambda x: x.clone().contiguous().to(torch.float32) + 1, {}, id="copies"),
        pytest.param(lambda x: torch.cat([x, x * 2], 1)[:, 3:] + 1, {}, id="part of a concatenation"),
        pytest.param(lambda x: torch.cat([torch.cat([x, x * 2], 1), x], 1), {"Concat": 1}, id="concatenations"),
        pytest.param(lambda x: x + x[:1, :1].expand(2, 3, 4), {"Slice": 2}, id="expand into a sum"),
        pytest.param(lambda x: x.mean(2, keepdim=True).flatten(1) + 1, {"Reduce": 1}, id="pooled and flattened"),
    ],
)
def test_views_are_simplified(model: Any, expected: dict[str, int]):
    kinds = kinds_after((simplify_views, remove_dead_code), model, torch.randn(2, 3, 4))
    del kinds["Pointwise"]
    assert kinds == expected


def test_copies_that_the_caller_could_tell_apart_stay():
    assert kinds_after((simplify_views,), lambda x: x.clone()[0], torch.randn(2, 3))["Copy"] == 1
    program = after((simplify_views,), lambda x: torch.cat([x, x * 2])[:2], torch.randn(2, 3))
    x = torch.zeros(2, 3)
    ReferenceExecutor(program).run([x])[0].add_(1)
    assert x.sum() == 0
    assert not any(isinstance(operator.kind, Copy) for operator in program.operators)


def test_optimise_names_its_passes_and_counts():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), trained_batch_norm(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    program = after(PASSES, model, torch.randn(1, 3, 8, 8))
    assert [type(operator.kind).__name__ for operator in program.operators] == ["Convolution", "Reduce"]
    _, reports = optimise(capture(model.eval(), (torch.randn(1, 3, 8, 8),)).program)
    assert [report.name for report in reports] == [function.__name__ for function in PASSES]
    assert reports[-1].num_operators_after == 2
    folded = reports[PASSES.index(fold_constants)]
    assert str(folded).startswith(f"fold_constants: {folded.num_operators_before} -> 5 operators")


class Pair(nn.Module):
    """A depthwise convolution, and what follows it."""

    def __init__(self, channels: int, columns: int, *, groups: int | None = None, pads: int = 0) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, groups=groups or channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, columns, 1, padding=pads)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()) + 1.0


class Shared(Pair):
    """Pair whose intermediate result is a result as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        between = self.first(x)
        return between, self.second(between)


def optimised(model: nn.Module, x: Tensor) -> Program:
    program, _ = optimise(capture(model.eval(), (x,), {}).program)
    check_program(program)
    return program


def num_separables(program: Program) -> int:
    return sum(isinstance(operator.kind, Separable) for operator in program.operators)


def test_a_pair_with_much_between_is_joined_and_gives_what_the_model_gives():
    torch.manual_seed(0)
    model, x = Pair(32, 8).eval(), torch.randn(1, 32, 64, 64)
    program = optimised(model, x)
    assert num_separables(program) == 1
    (result,) = ReferenceExecutor(program).run([x])
    torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (Pair(32, 8), 16),  # little is between
        (Pair(256, 256), 64),  # large weights
        (Pair(32, 8, groups=4), 64),
        (Pair(32, 8, pads=1), 64),
        (Shared(32, 8), 64),
    ],
    ids=["small", "weights", "groups", "padding", "shared"],
)
def test_other_pairs_stay_two(model: Pair, size: int):
    x = torch.randn(1, model.first.in_channels, size, size)
    assert num_separables(optimised(model, x)) == 0
