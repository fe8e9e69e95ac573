"""Pairs of convolutions that are fused, and the same results of each."""

from __future__ import annotations

import pytest
import torch
from mlsys_nimble.backends.reference.operators import ReferenceExecutor
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Separable
from mlsys_nimble.ir.program import Program, check_program
from mlsys_nimble.passes import optimise
from torch import Tensor, nn


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
