"""Linears that read the model's weights in place: which do, what they give, and how changes are seen."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_nimble import Nimble, load
from mlsys_nimble.backends.cpu import convolutions
from mlsys_nimble.backends.cpu.library import Kernel, View
from mlsys_nimble.backends.cpu.own_weights import (
    LEAST_NBYTES,
    Reader,
    is_readable,
    operators_in_place,
)
from mlsys_nimble.ir.operators import Epilogue
from torch import Tensor, nn

from tests.nimble.native.conftest import error_of, in_pieces


def reader(operator: int, *, weight: int = 9, nbytes: int = LEAST_NBYTES, can_be_in_place: bool = True) -> Reader:
    return Reader(operator, weight, nbytes, can_be_in_place)


def test_large_weights_are_in_place():
    assert operators_in_place([reader(0)]) == {0}
    assert not operators_in_place([reader(0, nbytes=LEAST_NBYTES - 4)])


def test_a_weight_is_in_place_for_all_its_readers_or_for_none():
    assert operators_in_place([reader(0), reader(1)]) == {0, 1}
    assert not operators_in_place([reader(0), reader(1, can_be_in_place=False)])
    others = [reader(0, can_be_in_place=False), reader(1, weight=8), reader(2, can_be_in_place=False)]
    assert operators_in_place(others) == {1}


def bound(bind: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Kernel, Tensor]:
    out = torch.zeros(len(weight))
    epilogue = Epilogue("relu", has_residual=True)
    views = View.of(x), weight, bias, View.of(out)
    return bind(epilogue, *views, residual=View.of(residual)), out


@given(
    features=st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 5000])),
    columns=st.one_of(st.integers(1, 70), st.sampled_from([128, 200])),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_results_are_those_of_packed_weights(native: Any, features: int, columns: int, has_bias: bool, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((features,), (columns, features)))
    bias, residual = (torch.randn(columns, generator=generator) for _ in range(2))
    tensors = x, weight, bias if has_bias else None, residual
    kernel, out = bound(convolutions.dots, *tensors)
    assert kernel.is_in_place
    in_pieces(kernel, out)
    packed, expected = bound(convolutions.gemv, *tensors)
    assert not packed.is_in_place
    packed.run()
    terms = (weight.double() * x.double()).abs().sum(1) + bias.abs() + residual.abs()
    assert bool(((out.double() - expected.double()).abs() <= (features + 4) * 2.0**-23 * terms).all())
    exact = torch.relu(weight.double() @ x.double() + (bias if has_bias else 0) + residual)
    rounded = features / native.kernel_lanes() + native.kernel_lanes() + 4  # additions behind one another
    assert bool(((out.double() - exact).abs() <= rounded * 2.0**-24 * terms).all())


def test_values_that_are_not_finite_stay_in_their_column(native: Any):
    weight = torch.ones(33, 40)
    weight[31, 5], weight[32, 7] = float("nan"), float("inf")
    x, nothing = torch.ones(40), torch.zeros(33)
    kernel, out = bound(convolutions.dots, x, weight, None, nothing)
    kernel.run()
    assert torch.equal(out[:31], torch.full((31,), 40.0))
    assert out[31].isnan()
    assert out[32].isinf()


def test_weights_that_no_kernel_reads_in_place_are_refused():
    memory = torch.zeros(70 * 64)
    assert is_readable(memory[:4096].view(64, 64))
    assert not is_readable(memory[1:4097].view(64, 64)), "misaligned"
    assert not is_readable(memory[:4096].view(64, 64).T)
    assert not is_readable(torch.zeros(1, 64).expand(64, 64))
    assert not is_readable(torch.zeros(64, 64, dtype=torch.float64))
    assert not is_readable(torch.zeros(64, 64, device="meta"))
    with pytest.raises(AssertionError, match="in place"):
        bound(convolutions.dots, torch.zeros(64), memory[1:4097].view(64, 64), None, torch.zeros(64))


class Head(nn.Module):
    """Two linears, of one row each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(520, 600), nn.Linear(600, 550)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def in_place(model: Nimble) -> set[str]:
    assert model.prepared is not None
    kernels = model.prepared.executor.decisions.kernels  # type: ignore[attr-defined]
    return {name for name, kernel in kernels.items() if kernel == "in place"}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(1, 520, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["bytes", "pages"])
def prepared(request: pytest.FixtureRequest, x: Tensor) -> tuple[Nimble, Head]:
    head = Head().eval()
    return Nimble(head).prepare(x, weights=request.param, num_threads=1), head


def check(model: Nimble, head: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        assert error_of(model(x), head(x)) < 1e-5


def test_a_write_to_a_part_is_seen_at_once_and_prepares_nothing(prepared: tuple[Nimble, Head], x: Tensor):
    model, head = prepared
    assert len(in_place(model)) == 2
    before = model.prepared
    writes: list[Callable[[], Any]] = [
        lambda: head.first.weight.data[7].mul_(-9),
        lambda: head.second.weight.detach().numpy().__setitem__((5, slice(None)), 4.0),
        lambda: head.first.weight.copy_(torch.full((600, 520), 0.25)),  # torch counts this one
    ]
    for write in writes:
        with torch.no_grad():
            write()
        check(model, head, x)
    assert model.prepared is before
    model.refresh()
    assert model.prepared is before, "nothing that was copied has changed"


def test_replaced_memory_and_parameters_are_noticed(prepared: tuple[Nimble, Head], x: Tensor):
    model, head = prepared
    before = model.prepared
    head.first.weight.data = torch.randn(600, 520)
    check(model, head, x)
    assert model.prepared is not before
    head.second.weight = nn.Parameter(torch.randn(550, 600))
    check(model, head, x)


def test_the_bias_is_copied_and_compared(x: Tensor):
    head = Head().eval()
    model = Nimble(head).prepare(x, num_threads=1)
    head.first.bias.data.add_(2)
    check(model, head, x)
    assert model.prepared is not None
    assert model.prepared.watch.nbytes == 4 * (600 + 550)


def test_a_schedule_holds_the_memory_that_it_reads(x: Tensor):
    head = Head().eval()
    model = Nimble(head).prepare(x, num_threads=1)
    assert model.prepared is not None
    executor, expected = model.prepared.executor, model(x)
    for linear in (head.first, head.second):
        linear.weight.data = torch.zeros_like(linear.weight)  # nobody else holds the old memory
    del model
    gc.collect()
    rest = [torch.full((600, 520), 7.0) for _ in range(20)]
    assert torch.equal(executor.run([x])[0], expected)
    del rest


def test_a_saved_model_stands_alone(prepared: tuple[Nimble, Head], x: Tensor, tmp_path: Any):
    model, head = prepared
    expected = model(x)
    model.save(tmp_path / "head.nimble")
    saved = load(tmp_path / "head.nimble")
    with torch.no_grad():
        head.first.weight.zero_()
    assert torch.equal(saved(x), expected)
    assert set(saved.schedules[0].executor.decisions.kernels.values()) == {"in place"}


def test_weights_that_others_pack_are_packed(x: Tensor):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(520, 520))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight) + (self.weight * 2)[3] + nn.functional.linear(x, self.weight.T)

    both = Shared().eval()
    model = Nimble(both).prepare(x, num_threads=1)
    for _ in range(2):
        check(model, both, x)
        both.weight.data[3].mul_(3)


def test_folded_and_bf16_weights_are_packed(x: Tensor):
    folded = nn.Sequential(nn.Linear(520, 600), nn.BatchNorm1d(600)).eval()
    assert not in_place(Nimble(folded).prepare(x, num_threads=1))
    head = Head().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16())
    assert not in_place(Nimble(head).prepare(x, num_threads=1))
    assert not in_place(Nimble(Head().eval()).prepare(x, num_threads=1, precision="bf16"))


def test_several_rows_and_views_of_weights_are_packed(x: Tensor):
    head = Head().eval()
    assert not in_place(Nimble(head).prepare(x.expand(2, 520).contiguous(), num_threads=1))
    head.first.weight = nn.Parameter(torch.randn(520, 600).T)
    model = Nimble(head).prepare(x, num_threads=1)
    assert len(in_place(model)) == 1
    head.first.weight.data[3].mul_(5)
    check(model, head, x)


def test_dynamic_sizes_pack(x: Tensor):
    head = Head().eval()
    model = Nimble(head).prepare(x.expand(3, 520).contiguous(), dynamic={"x": {0: (1, 64)}}, num_threads=1)
    for rows in (1, 5):
        given_x = torch.randn(rows, 520)
        check(model, head, given_x)
        head.first.weight.data.mul_(1.5)


def test_a_file_cannot_have_a_weight_without_memory_read_in_place(x: Tensor):
    model = Nimble(Head().eval()).prepare(x, num_threads=1)
    assert model.prepared is not None
    executor: Any = model.prepared.executor
    hollow = {value: constant.to("meta") for value, constant in executor.source.constants.items()}
    with pytest.raises(ValueError, match="packed weights of another size"):
        type(executor)(replace(executor.source, constants=hollow), num_threads=1, decided=executor.decisions)
