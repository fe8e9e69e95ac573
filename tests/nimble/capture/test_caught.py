"""Errors that forward catches itself: a refusal is raised all the same, and no other branch is replayed for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from mlsys_nimble import CaptureError, Nimble
from torch import Tensor, nn

ASKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x * x.sum().item(),
    "bool": lambda x: x + 1 if x.sum() > 0 else x,
    "nonzero": lambda x: x[x > 0].sum(),
    "numpy": lambda x: x * float(x.numpy().max()),
    "list": lambda x: x * x.tolist()[0],
    "address": lambda x: x * x.data_ptr(),
    "strides": lambda x: x[1:].as_strided((2,), (2,)).sum(),
    "number of another call": lambda x: torch.linalg.cholesky(x.outer(x)),  # raises for what is not positive
}


def _excepted(ask: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return ask(x)
    except Exception:  # noqa: BLE001 - as foreign models do
        return x - 1


def _suppressed(ask: Callable[[Tensor], Any], x: Tensor) -> Any:
    with contextlib.suppress(BaseException):
        x = x + ask(x)
    return x * 3


def _dropped(ask: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return ask(x)
    finally:
        return x * 2  # noqa: B012, SIM107 - drops the error


class Catching(nn.Module):
    """Model that goes on in its own way after an error."""

    def __init__(self, ask: Callable[[Tensor], Any], catch: Callable[..., Any]) -> None:
        super().__init__()
        self.ask, self.catch = ask, catch

    def forward(self, x: Tensor) -> Any:
        return self.catch(self.ask, x.tanh())


@pytest.mark.parametrize(("name", "catch"), [*product(ASKS, (_excepted, _suppressed, _dropped))])
def test_a_model_that_catches_a_refusal_is_refused_or_right(name: str, catch: Callable[..., Any]):
    model = Catching(ASKS[name], catch)
    x = torch.randn(5)
    with pytest.raises(CaptureError):
        Nimble(model).prepare(x, executor="reference")
    with torch.no_grad():
        eager = Nimble(model).prepare(x, executor="reference", fallback="eager")
        for each in (x, -x):
            if name != "address":
                torch.testing.assert_close(eager(each), model(each))


def test_torch_may_try_one_overload_after_another():
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(x, x.sum())  # an overload with a number comes first

    model, x = Product(), torch.randn(3)
    torch.testing.assert_close(Nimble(model).prepare(x)(x), model(x))
