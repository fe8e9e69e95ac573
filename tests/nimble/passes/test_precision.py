"""Weights rounded to bf16: by whom they are read, and what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import Nimble
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Linear
from mlsys_nimble.ir.program import check_program
from mlsys_nimble.passes.precision import round_weights
from torch import Tensor, nn


class Tied(nn.Module):
    """Its table is also the weight of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 24)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states = self.table(ids)
        return states, states @ self.table.weight.T + nn.functional.linear(states, self.table.weight)


def rounded(model: nn.Module, *inputs: Tensor) -> Any:
    before = capture(model, inputs, {}).program
    after = round_weights(before)
    check_program(after)
    return before, after


def test_weights_of_linears_and_convolutions_are_what_bf16_holds_and_biases_stay():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
    before, after = rounded(model, torch.randn(1, 3, 8, 8))
    for old, new in zip(before.operators, after.operators, strict=True):
        if len(new.inputs) < 3:
            continue
        weight, bias = (after.constants[value] for value in new.inputs[1:])
        assert torch.equal(weight, before.constants[old.inputs[1]].bfloat16().float())
        assert torch.equal(bias, before.constants[old.inputs[2]])


def test_a_table_keeps_its_precision_beside_the_linear_that_shares_it():
    model = Tied().eval()
    _, after = rounded(model, torch.tensor([[3, 7]]))
    tables = [after.constants[operator.inputs[0]] for operator in after.operators if operator.name.startswith("table")]
    assert any(torch.equal(table, model.table.weight) for table in tables)
    linears = [operator for operator in after.operators if isinstance(operator.kind, Linear)]
    weights = [after.constants[one.inputs[1]] for one in linears if one.inputs[1] in after.constants]
    assert weights
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in weights)


@pytest.mark.parametrize("executor", ["reference", "native"])
def test_a_prepared_model_computes_with_rounded_weights(executor: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 70), nn.Linear(70, 9)).eval()
    x = torch.randn(1, 4, 8, 8)
    exact = model(x)
    nimble = Nimble(model).prepare(x, executor=executor, precision="bf16", num_threads=1)
    with torch.no_grad():
        for module in (model[0], model[3], model[4]):
            module.weight.copy_(module.weight.bfloat16())
    got = nimble(x)
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_another_precision_is_refused():
    with pytest.raises(InvalidInputError, match="precision is 'fp8'"):
        Nimble(nn.ReLU()).prepare(torch.zeros(1), precision="fp8")
