"""Semantics of programs: memory shared and written to, dtypes, shapes, structure."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.conformance.nimble.cases import Call, Case, integers, normal


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(4, 3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        self.history[1:] = self.history[:-1].clone()
        self.history[0] = x.mean(0)
        self.mean = 0.9 * self.mean + 0.1 * self.history.mean(0)
        return x - self.mean, self.calls


def scatter_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3].mul_(3).add_(1)
    y[0] = -1
    y.t()[2].fill_(7)
    y[::2, 0] += 5
    return y


def aliases(x: Tensor) -> tuple[Tensor, ...]:
    y = x + 1
    return y, y.view(-1), y[0], y.t(), y


def write_to_input(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    x[0].zero_()
    return x


def masks(x: Tensor, flags: Tensor) -> tuple[Tensor, ...]:
    chosen = torch.where(flags & (x > 0), x, -x).masked_fill(~flags, 0.5)
    return chosen, flags | (x < -1), (x != x).any(), flags.sum(1)


def whole_numbers(ids: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    return ids + other * 3, ids // 2, ids % 5, ids / 4, (ids == other).long(), ids.float() * 0.5, ids.clamp(2, 7)


def elementwise(x: Tensor, y: Tensor) -> Tensor:
    z = torch.exp(-(x**2)) * torch.sin(y) + torch.erf(x) - torch.cos(x) * torch.rsqrt(y.abs() + 1)
    return functional.elu(z) + functional.hardsigmoid(z) * functional.relu6(x) + torch.maximum(x, y).clamp(-1, 0.5)


def odd_indices(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x[:, [0, 2, 1]],
        x[-1, ..., -2:],
        x[:, None, ::2],
        x.flip(1),
        x.gather(1, torch.zeros(2, 1, 4, dtype=torch.long)),
    )


SEMANTICS = [
    Case("views and aliases", lambda: Call(aliases), normal((3, 4))),
    Case("in-place operators", lambda: Call(scatter_in_place), normal((4, 5))),
    Case("an input written to", lambda: Call(write_to_input), normal((3, 4), (3, 4))),
    Case("inputs returned", lambda: Call(lambda x, y: (y, x, x + y, x, None, "text", 3)), normal((2, 2), (2, 2))),
    Case("buffers mutated", Counter, normal((5, 3))),
    Case(
        "constants returned",
        lambda: Call(lambda self, x: (self.table, torch.ones(2), self.table[0], x), table=torch.eye(3)),
        normal((2,)),
    ),
    Case("masks", lambda: Call(masks), lambda g: (torch.randn(3, 4, generator=g), torch.randn(3, 4, generator=g) > 0)),
    Case("whole numbers", lambda: Call(whole_numbers), integers(10, (3, 4), (3, 4))),
    Case("large whole numbers", lambda: Call(lambda x: (x + 2**40, x * 2**33 == 2**33, x << 1)), integers(3, (4,))),
    Case(
        "double precision",
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(),
        lambda g: (torch.randn(2, 4, generator=g, dtype=torch.float64),),
    ),
    Case(
        "half precision",
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()).bfloat16(),
        lambda g: (torch.randn(2, 8, generator=g).bfloat16(),),
    ),
    Case("elementwise", lambda: Call(elementwise), normal((3, 4), (4,))),
    Case(
        "reductions",
        lambda: Call(
            lambda x: (
                x.sum(),
                x.mean((0, 2)),
                x.amax(1, True),
                x.min(),
                x.std(),
                x.var(1),
                x.norm(dim=-1),
                x.argmax(),
                x.logsumexp(2),
            )
        ),
        normal((2, 3, 4)),
    ),
    Case("odd indices", lambda: Call(odd_indices), normal((2, 3, 4))),
    Case(
        "sorted and chosen", lambda: Call(lambda x: (*torch.topk(x, 2), x.sort().values, x.cumsum(1))), normal((3, 5))
    ),
    Case(
        "repeats",
        lambda: Call(
            lambda x: (x.repeat(2, 1, 3), x.repeat_interleave(2, 0), torch.stack([x, x], 1), x.expand(4, 2, 3).sum(0))
        ),
        normal((2, 3)),
    ),
    Case(
        "empty dimensions",
        lambda: Call(
            lambda x, y: (
                x + 1,
                torch.cat([x, x], 1),
                x.sum(0),
                y[:, :0],
                torch.cat([y[:, :0], y], 1),
                x @ y.new_ones(3, 2),
            )
        ),
        normal((0, 3), (2, 3)),
    ),
    Case(
        "dimensions of one",
        lambda: Call(
            lambda self, x: (self.conv(x).squeeze(), x.squeeze(0).unsqueeze(-1).softmax(-1)), conv=nn.Conv2d(1, 1, 1)
        ),
        normal((1, 1, 1, 1)),
    ),
    Case("scalars", lambda: Call(lambda x, y: (x * 2 + y, x.reshape(1), torch.stack([x, y]).mean())), normal((), ())),
    Case(
        "nested arguments",
        lambda: Call(lambda items: {"sum": items["a"][0] + items["b"], "again": [items["b"]]}),
        lambda g: ({"a": (torch.randn(2, generator=g), 1), "b": torch.randn(2, generator=g)},),
    ),
    Case("complex numbers", lambda: Call(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2)), normal((2, 8))),
]
