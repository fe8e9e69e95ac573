"""Programs of a few steps, some of which mix requests behind a bound: refused by name, or each answer is its own.

A bound is drawn from one to a billion, so no list of trial values passes it. What decides is whether an operator
computes a value of several requests: programs with one must be refused, and those without must be let through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from mlsys_serving.isolation.reading import mixing_operator
from torch import Tensor

WIDTH = 6
Step = Callable[[Tensor], Tensor]  # [requests, WIDTH] -> the same shape, of floats


def _weights(seed: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def _written(x: Tensor) -> Tensor:
    """Write in place through a view."""
    y = x.clone()
    y[:, 1:].mul_(3).add_(x[:, :1])
    return y


def _sorted(x: Tensor) -> Tensor:
    """Sort the requests, work on them, put them back."""
    order = x[:, 0].argsort()
    return torch.zeros_like(x).index_copy(0, order, x.index_select(0, order) * 2)


APART: dict[str, Step] = {
    "linear": lambda x: torch.nn.functional.linear(x, _weights(1)),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (WIDTH,)),
    "softmax": lambda x: x.softmax(1),
    "time first": lambda x: (x.t().contiguous() * 2 + 1).t(),
    "flat": lambda x: (x.reshape(-1) * 2 + 1).view(x.shape),
    "sorted within": lambda x: x.sort(1).values,
    "bounded within": lambda x: x / x.abs().amax(1, keepdim=True).clamp(min=3),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.contiguous().view(-1, 3, 2)) * 1j).flatten(1),
    "written": _written,
    "convolved": lambda x: torch.conv1d(x[:, None], _weights(2)[None, :1, :3], padding=1)[:, 0],
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(-1, 1, 3, 2)] * 3).flatten(1),
    "table": lambda x: _weights(3)[x.abs().long().clamp(max=5)].sum(1) + x,
    "put back": _sorted,
}
REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(),
    "sum over requests": lambda x: x.sum(0),
    "mean of squares": lambda x: (x * x).mean(),
    "least": lambda x: -x.amin(0, keepdim=True),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "scan": lambda x: x.cumsum(0)[-1],
    "integers": lambda x: x.long().max(),
    "any": lambda x: (x > 1e3).any() * 1e12,
    "the first": lambda x: x[0],
}
GATES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {  # numbers, what was reduced, a bound
    "clamp": lambda x, by, bound: x / by.clamp(min=bound),
    "where": lambda x, by, bound: torch.where(by > bound, x * 2, x),
    "least of two": lambda x, by, bound: x + torch.minimum(-by, torch.tensor(-bound)) + bound,
    "relu": lambda x, by, bound: x + torch.relu(by - bound),
    "mask": lambda x, by, bound: x.masked_fill(by.expand(x.shape) > bound, 0.0),
    "round": lambda x, by, bound: x + (by / (2 * bound)).round(),
    "plain": lambda x, by, bound: x + by,
}


@dataclass(frozen=True)
class Program:
    """Steps, and where one that mixes stands among them; None: nowhere."""

    before: tuple[str, ...]
    mixing: tuple[str, str, float] | None  # what is reduced, the gate, its bound
    after: tuple[str, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Run it."""
        for name in self.before:
            x = APART[name](x)
        if self.mixing is not None:
            reduced, gate, bound = self.mixing
            x = GATES[gate](x, REDUCED[reduced](x), bound)
        for name in self.after:
            x = APART[name](x)
        return x


def programs() -> st.SearchStrategy[Program]:
    """Draw programs; half of them mix."""
    steps = st.lists(st.sampled_from(sorted(APART)), max_size=3).map(tuple)
    bounds = st.floats(0, 9).map(lambda power: 10.0**power)
    mixing = st.tuples(st.sampled_from(sorted(REDUCED)), st.sampled_from(sorted(GATES)), bounds)
    return st.builds(Program, steps, st.none() | mixing, steps)


def fault(program: Program) -> str | None:
    """Return what is wrong with the verdict on a program; None: nothing."""
    named = mixing_operator(program, [torch.zeros(1, WIDTH)])
    if (named is None) == (program.mixing is None):
        return None
    return f"{named or 'no operator'} is named in {program}"
