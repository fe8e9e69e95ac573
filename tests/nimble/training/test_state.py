"""State of a model prepared for training: every object stays after the preparation, and steps change it as eager's.

Models are drawn: each does a few things to what modules hold. A thing is refused, or done as eager does it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import MlsysError
from mlsys_nimble import Nimble
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

Things = list[str]


class Holds(nn.Module):
    """Layers, buffers and other tensors, and what is done with them in turn."""

    def __init__(self, things: Things) -> None:
        super().__init__()
        self.things = things
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.shared, self.norm, self.recurrent = self.first, nn.BatchNorm1d(4), nn.LSTM(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(4))
        self.last, self.plain, self.tied = torch.zeros(3, 4), torch.ones(4), torch.ones(4)
        self.same, self.none, self.cache, self.kept = self.tied, None, {"old": torch.ones(4)}, [torch.ones(4)]
        for kind, layer in {
            "spectral": spectral_norm(nn.Linear(4, 4)),
            "pruned": prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
            "parametrised": parametrizations.weight_norm(nn.Linear(4, 4)),
        }.items():
            self.add_module(kind, layer if kind in things else nn.Identity())

    def forward(self, x: Tensor) -> Any:
        for thing in self.things:
            x = DONE[thing](self, x)
        shapes = {"a list": [x, x * 2], "a tuple": (x, x * 2), "a dictionary": {"x": x}}
        return shapes.get(self.things[0], x)


def _set(name: str, value: Callable[[Holds, Tensor], Any]) -> Callable[[Holds, Tensor], Tensor]:
    def run(model: Holds, x: Tensor) -> Tensor:
        setattr(model, name, value(model, x))
        return x

    return run


def _put(value: Callable[[Holds, Tensor], Any]) -> Callable[[Holds, Tensor], Tensor]:
    def run(model: Holds, x: Tensor) -> Tensor:
        value(model, x)
        return x

    return run


def _without_gradients(write: Callable[[Holds], Any]) -> Callable[[Holds, Tensor], Tensor]:
    def run(model: Holds, x: Tensor) -> Tensor:
        with torch.no_grad():
            write(model)
        return x

    return run


def _swapped(model: Holds, x: Tensor) -> Tensor:
    model.plain, model.mean = model.mean, model.plain
    return x + model.plain


def _exchanged(model: Holds, x: Tensor) -> Tensor:
    before, model.last = model.last, x.detach()[:3]
    return torch.cat([before, x[3:]])


DONE: dict[str, Callable[[Holds, Tensor], Tensor]] = {
    "a list": lambda m, x: m.first(x),
    "a tuple": lambda m, x: m.third(x),
    "a dictionary": lambda m, x: m.first(x),
    "a layer under its other name": lambda m, x: m.shared(x).tanh(),
    "a tied weight": lambda m, x: m.second(x),
    "norm": lambda m, x: m.norm(x),
    "norm of a transposed sequence": lambda m, x: m.norm(x.view(3, 2, 4).mT).mT.reshape(6, 4),
    "recurrent": lambda m, x: m.recurrent(x)[0],
    "spectral": lambda m, x: m.spectral(x),
    "pruned": lambda m, x: m.pruned(x),
    "parametrised": lambda m, x: m.parametrised(x),
    "diagonal": lambda m, x: (x @ x.mT).fill_diagonal_(0.5) @ x,
    "last": _set("last", lambda m, x: x),
    "a part of it as last": _set("last", lambda m, x: x[:2]),
    "last detached": _set("last", lambda m, x: x.detach()),
    "last read": lambda m, x: x + m.last.sum(),
    "none": _set("none", lambda m, x: x),
    "none to a constant": _set("none", lambda m, x: torch.arange(4.0)),
    "a fresh attribute": _set("fresh", lambda m, x: x),
    "tied": _set("tied", lambda m, x: m.tied + 1),
    "tied read": lambda m, x: x * m.same,
    "a running mean": _set("mean", lambda m, x: 0.9 * m.mean + 0.1 * x.detach().mean(0)),
    "mean written": _put(lambda m, x: m.mean.copy_(x.detach().mean(0))),
    "mean read": lambda m, x: x - m.mean,
    "no mean": _set("mean", lambda m, x: None),
    "swapped": _swapped,
    "last of before": _exchanged,
    "plain grows": _set("plain", lambda m, x: m.plain * 1.5),
    "plain read": lambda m, x: x * m.plain,
    "an entry": _put(lambda m, x: m.cache.update(old=x)),
    "a new entry": _put(lambda m, x: m.cache.update(new=x)),
    "an entry read": lambda m, x: x + m.cache["old"].sum(),
    "an entry written": _put(lambda m, x: m.cache["old"].add_(1)),
    "one more": _put(lambda m, x: m.kept.append(x)),
    "the first replaced": _put(lambda m, x: m.kept.__setitem__(0, x.detach().mean(0))),
    "clamped": _without_gradients(lambda m: m.first.weight.clamp_(-0.1, 0.1)),
    "other memory": _put(lambda m, x: setattr(m.third.bias, "data", m.third.bias.data * 0.5)),
}


def held(item: Any, seen: dict[int, Any]) -> Any:
    """Everything that an object holds: what it is, its values and whether it has a graph."""
    if id(item) not in seen:
        seen[id(item)] = item
        if isinstance(item, nn.Module):
            return id(item), held(vars(item), seen)
        if isinstance(item, dict):
            return id(item), [(key, held(value, seen)) for key, value in item.items()]
        if isinstance(item, list | tuple):
            return id(item), [held(value, seen) for value in item]
        if isinstance(item, Tensor):
            return id(item), item.requires_grad, item.grad is None, item.grad_fn is None, item.detach().tolist()
    return id(item)


def made(things: Things) -> Holds:
    torch.manual_seed(0)
    return Holds(things)


def state(model: Holds) -> Any:
    names = ("last", "plain", "tied", "same", "none", "cache", "kept")
    return {name: getattr(model, name) for name in names} | dict(model.named_buffers())


def stepped(model: Holds, run: Callable[[Tensor], Any], number: int) -> tuple[Any, list[Tensor | None], Any]:
    torch.manual_seed(number)
    results = run(torch.randn(6, 4))
    model.zero_grad()
    torch.stack([y.square().sum() for y in torch.utils._pytree.tree_leaves(results)]).sum().backward()
    return results, [parameter.grad for parameter in model.parameters()], state(model)


def judge(things: Things) -> str:
    """Compare three steps of a model with eager's; refusals are told from faults."""
    model, eager = made(things), made(things)
    try:
        expected = [stepped(eager, eager, number)[:2] for number in range(3)]
        expected_state = state(eager)
    except (RuntimeError, TypeError, AttributeError):
        return "not run"
    before = held(model, {})
    try:
        prepared = Nimble(model).prepare(torch.randn(6, 4), training=True)
    except MlsysError:
        prepared = None
    assert held(model, {}) == before, things
    if prepared is None:
        return "refused"
    found = [stepped(model, prepared, number)[:2] for number in range(3)]
    assert type(found[0][0]) is type(expected[0][0])
    torch.testing.assert_close((found, state(model)), (expected, expected_state), rtol=1e-4, atol=1e-5)
    return "equal"


ANY = st.lists(st.sampled_from(sorted(DONE)), min_size=1, max_size=4).map(lambda things: [*things, "a tied weight"])


@pytest.mark.parametrize("thing", sorted(DONE))
def test_a_preparation_leaves_the_model_as_it_was(thing: str):
    assert judge([thing, "a tied weight"]) != "not run"


@settings(max_examples=25)
@given(ANY)
def test_steps_change_a_model_as_eager_does(things: Things):
    judge(things)
