"""Models that no schedule holds, in each way to run them: as eager, or a refusal whose way out works."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from mlsys_nimble import CaptureError, Nimble
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

Forward = Callable[..., Any]


class Layers(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear, self.recurrent, self.run = nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True), forward
        self.all: list[Tensor] = []
        self.by_name: dict[str, Tensor] = {}
        self.count = 0

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def _named(m: Layers, x: Tensor) -> Tensor:
    with torch.profiler.record_function("block"), torch.autograd.profiler.record_function("part", "of it"):
        return m.linear(x).relu()


def _forces(m: Layers, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(m.linear(x).tanh().sum(), x)[0]


def _energy(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = m.linear(x).tanh().sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


def _packed(m: Layers, x: Tensor, lengths: Any) -> Tensor:
    packed = pack_padded_sequence(m.linear(x), lengths, batch_first=True, enforce_sorted=False)
    y: Tensor = pad_packed_sequence(m.recurrent(packed)[0], batch_first=True)[0]
    return y


def _is_packed(m: Layers, packed: PackedSequence) -> Tensor:
    y: Tensor = pad_packed_sequence(m.recurrent(packed)[0], batch_first=True)[0]
    return y


def _kept(m: Layers, x: Tensor) -> Tensor:
    m.last = m.linear(x).tanh()
    return m.last + 1


def _collected(m: Layers, x: Tensor) -> Tensor:
    m.all.append(m.linear(x).tanh())
    m.by_name["last"] = x * 2
    m.count += 1
    y: Tensor = m.all[-1] + m.count
    return y


def _jacobian(take: Any) -> Forward:
    return lambda m, x: take(lambda z: m.linear(z).tanh().sum((0, 1)))(x)


X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[Forward, list[tuple[Any, ...]]]] = {
    "record_function": (_named, [(X,), (X * 2,)]),
    "forces": (_forces, [(X,), (X * 2,)]),
    "energy and forces": (_energy, [(X,), (X * 2,)]),
    "lengths in a tensor": (_packed, [(X, torch.tensor([3, 5])), (X, torch.tensor([5, 2]))]),
    "lengths in a list": (_packed, [(X, [3, 5]), (X, [5, 2])]),
    "a packed argument": (_is_packed, [(pack_padded_sequence(X, [5, n], batch_first=True),) for n in (3, 1)]),
}
MODELS |= {
    name: (forward, [(X,), (-X,), (X.roll(1, 2),)])
    for name, forward in {
        "mask": lambda m, x: m.linear(x[x[..., 0] > 0]),
        "nonzero": lambda m, x: m.linear(x)[(x > 0).nonzero(as_tuple=True)],
        "a kept tensor": _kept,
        "collected tensors": _collected,
        "jacrev": _jacobian(torch.func.jacrev),
        "jacfwd": _jacobian(torch.func.jacfwd),
        "hessian": lambda m, x: torch.func.hessian(lambda z: m.linear(z).tanh().sum())(x[0, 0]),
        "jacobian by autograd": lambda m, x: torch.autograd.functional.jacobian(lambda z: m.linear(z).tanh().sum(), x),
    }.items()
}
A = (torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.5).float()
MODELS |= {
    f"adjacency, {each.layout}": (lambda m, x, a: m.linear(a @ x), [(X[0], each), (-X[1], each)])
    for each in (A.to_sparse(), A.to_sparse_csr())
}
WAYS: dict[str, dict[str, Any]] = {
    "prepared": {},
    "prepared with a fallback": {"fallback": "eager"},
    "trained": {"training": True},
    "trained with a fallback": {"training": True, "fallback": "eager"},
}


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("way", [*WAYS, "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_every_way_gives_what_eager_gives_or_names_another(name: str, way: str, has_gradients: bool):
    forward, calls = MODELS[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Layers(forward)
    eager = deepcopy(model)
    with torch.set_grad_enabled(has_gradients):
        try:
            prepare = Nimble(model).prepare
            run = torch.compile(model, backend="nimble") if way == "compiled" else prepare(calls[0], **WAYS[way])
        except CaptureError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert "fallback" not in WAYS[way]
            assert "fallback='eager'" in refused
            assert "forces" not in name or "autograd.grad" in refused
            return
        for args in (*calls, calls[0]):
            got, expected = run(*args), eager(*args)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            assert type(got) is type(expected)
