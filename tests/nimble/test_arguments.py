"""Arguments and options of any kind: taken and right, or refused by an error of this project."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_nimble import Nimble
from mlsys_nimble.options import Options
from torch import Tensor, nn

NAMES = [field.name for field in fields(Options)]
JUNK = st.sampled_from([-1, 0, 2**70, 1.5, float("nan"), "2", "", b"1", (), [1], {}, object(), torch.ones(2), int])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), JUNK)
def test_an_option_of_another_kind_is_refused_by_name(name: str, value: Any):
    if (name, value) == ("winograd", 0):
        return
    with pytest.raises(InvalidInputError, match=name):
        Nimble(nn.ReLU()).prepare(torch.ones(2), **{name: value})


BOUNDS = st.one_of(st.tuples(st.integers(-2, 2**60), st.integers(-2, 2**60)), JUNK)
RANGES = st.one_of(
    JUNK,
    st.dictionaries(
        st.sampled_from([0, 1, "input", "other", -1, 2.5, None]),
        st.one_of(JUNK, st.dictionaries(st.sampled_from([0, 1, -1, 5, "0", None]), BOUNDS, max_size=2)),
        max_size=2,
    ),
)


@settings(max_examples=60, deadline=None)
@given(RANGES)
def test_ranges_of_any_kind_are_served_or_refused(dynamic: Any):
    x = torch.ones(3, 8)
    model = nn.Linear(8, 4)
    try:
        prepared = Nimble(model).prepare(x, dynamic=dynamic)
    except MlsysError:
        return
    torch.testing.assert_close(prepared(x), model(x).detach())


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["x * k", "x + k", "x[:k]", "x.sum() + k", "x // k", "x.roll(k)", "x ** k"]),
    st.lists(st.one_of(st.integers(-4, 9), st.integers(-(2**40), 2**40)), min_size=2, max_size=4, unique=True),
)
def test_integers_that_change_between_compiled_calls(text: str, numbers: list[int]):
    torch._dynamo.reset()
    function = eval(f"lambda x, k: {text}")
    compiled = torch.compile(function, backend="nimble")
    x = torch.arange(1.0, 6.0)
    with torch.no_grad():
        for number in numbers:
            try:
                expected = function(x, number)
            except Exception:  # noqa: BLE001 - no case
                continue
            torch.testing.assert_close(compiled(x, number), expected)


class Layer(nn.Module):
    """Module with a parameter, a buffer, a submodule and attributes that may be absent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.ones(3))
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x * self.weight + self.shift) * getattr(self, "factor", 1)
        return y


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight", torch.full((3,), 2.0)),
        ("shift", torch.full((3,), 5.0)),
        ("inner", nn.Tanh()),
        ("forward", torch.neg),
        ("factor", 3),
    ],
)
def test_what_an_attribute_hides_is_not_replayed(name: str, value: Any, depth: int):
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(2, 3)
    prepared = Nimble(model).prepare(x, executor="reference")
    prepared(x)
    object.__setattr__(model[depth], name, value)
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), model(x))
        delattr(model[depth], name)
        torch.testing.assert_close(prepared(x), model(x))
