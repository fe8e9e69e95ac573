"""Operators of torch's test data under ambient modes: equal to eager in the mode of the call, and modes left alone."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from mlsys_nimble import Nimble
from mlsys_nimble.modes import modes_restored
from torch.autograd import forward_ad

from tests.oracles.nimble_opinfo import ambient, plan
from tests.oracles.nimble_opinfo.cases import Case
from tests.oracles.nimble_opinfo.judge import Tally, judge_in_modes


def test_operators_under_ambient_modes():
    tally = Tally("nimble-opinfo, ambient")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for work in islice((work for work in plan.in_modes() if work.path != "compile"), 5, None, 131):
        for judgement in plan.judgements(work):
            tally.add(judgement)
    torch.set_num_threads(before)
    assert tally.faults == []
    assert tally.counts["equal"] > 10


def test_a_mode_that_is_left_on_is_noticed():
    def leaves(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return x + 1

    case = Case("leaves", leaves, (torch.ones(3),))
    with torch.enable_grad():
        assert judge_in_modes(case, "reference", ("", "gradients")).verdict == "equal"  # the case's own, undone
    before = ambient.present()
    with modes_restored():
        leaves(torch.ones(3))
        torch.set_default_dtype(torch.float64)
        torch.device("meta").__enter__()
        forward_ad.enter_dual_level()
        torch._C._functorch._grad_increment_nesting()
        torch.autocast("cpu", torch.bfloat16).__enter__()
        assert ambient.present() != before
    assert ambient.present() == before


@pytest.mark.parametrize("mode", [mode for mode in ambient.MODES if "float" in mode])
def test_layers_whose_weights_are_packed(mode: str):
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 5), torch.nn.LayerNorm(5)).eval()
    case = Case("layers", model, (torch.randn(2, 3, 8, 8),))
    assert judge_in_modes(case, "native", (mode, mode)).verdict == "equal"


@pytest.mark.parametrize(
    "product", [lambda a, b: torch.tensordot(a, b, 1), lambda a, b: torch.linalg.multi_dot([a, b])]
)
@pytest.mark.parametrize("is_on", [True, False])
def test_products_that_are_recorded_in_parts_are_cast_as_eager_casts_them(product: Any, is_on: bool):
    class Product(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.float16, enabled=is_on):
                return product(a, b)

    a, b = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(4, 5, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = Product()(a, b)
        found = Nimble(Product().eval()).prepare((a, b))(a, b)
    assert found.dtype == expected.dtype == (torch.float16 if is_on else torch.bfloat16)
    assert torch.equal(found, expected)
