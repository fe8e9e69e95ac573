"""Weights rounded to bf16: by whom they are read, and what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import Nimble, load
from mlsys_nimble.capture import capture
from mlsys_nimble.ir.operators import Bf16Product, Linear
from mlsys_nimble.ir.program import check_program
from mlsys_nimble.passes.precision import multiply_pairs, round_weights
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


class Mixed(nn.Module):
    """Linears and convolutions of all forms, among them one whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.planes = nn.Conv2d(3, 32, 4, stride=2, bias=False), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.mixed, self.head = nn.Conv2d(32, 40, 1), nn.Linear(40, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pixels(x).relu()
        x = self.mixed(self.planes(x)).relu().mean((2, 3))
        y: Tensor = nn.functional.linear(self.head(x), x[:, :12] + 1)
        return y


def test_inputs_of_constant_products_are_rounded_and_others_are_not():
    program = multiply_pairs(rounded(Mixed().eval(), torch.randn(2, 3, 9, 9))[1])
    check_program(program)
    kinds = {operator.name: type(operator.kind).__name__ for operator in program.operators}
    assert sum(kind == "Bf16Product" for kind in kinds.values()) == 3
    assert any(name.startswith("planes") and kind == "Convolution" for name, kind in kinds.items())


@pytest.mark.parametrize("executor", ["reference", "native"])
def test_a_model_prepared_in_pairs_rounds_what_its_products_read(executor: str) -> None:
    torch.manual_seed(1)
    model, x = Mixed().eval(), torch.randn(2, 3, 37, 37)
    with torch.no_grad():
        exact = model(x)
        nimble = Nimble(model).prepare(x, executor=executor, precision="bf16-pairs", num_threads=1)
        got = nimble(x)
        for module in (model.pixels, model.planes, model.mixed, model.head):
            module.weight.copy_(module.weight.bfloat16())
            if module is not model.planes:
                module.register_forward_pre_hook(lambda _, args: (args[0].bfloat16().float(),))
        torch.testing.assert_close(got, model(x), rtol=2e-3, atol=2e-3)  # a sum near a tie rounds to either side
    assert not torch.allclose(got, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, exact, rtol=0.05, atol=0.05)


def test_pairs_serve_sizes_and_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 9)).eval()
    nimble = Nimble(model).prepare(torch.randn(5, 24), precision="bf16-pairs", num_threads=1)
    nimble.save(tmp_path / "net.nimble")
    loaded = load(tmp_path / "net.nimble")
    many = Nimble(model).prepare(torch.randn(5, 24), precision="bf16-pairs", num_threads=1, dynamic={0: {0: (1, 40)}})
    for rows in (1, 5, 33):
        x = torch.randn(rows, 24)
        one = Nimble(model).prepare(x, precision="bf16-pairs", executor="reference")
        torch.testing.assert_close(many(x), one(x), rtol=1e-4, atol=1e-4)
        if rows == 5:
            assert torch.equal(loaded(x), nimble(x))
    assert nimble.prepared is not None
    assert any(isinstance(one.kind, Bf16Product) for one in nimble.prepared.program.operators)


def test_pairs_are_refused_where_they_do_not_run() -> None:
    with pytest.raises(InvalidInputError, match="'bf16-pairs' is for CPUs"):
        Nimble(nn.Linear(2, 2)).prepare(torch.zeros(1, 2), precision="bf16-pairs", executor="cuda")
    for precision in ("bf16", "bf16-pairs"):
        with pytest.raises(InvalidInputError, match="for inference alone"):
            Nimble(nn.Linear(2, 2)).prepare(torch.zeros(1, 2), precision=precision, training=True)


def test_another_precision_is_refused():
    with pytest.raises(InvalidInputError, match="precision is 'fp8'"):
        Nimble(nn.ReLU()).prepare(torch.zeros(1), precision="fp8")
