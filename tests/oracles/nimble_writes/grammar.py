"""Random programs that write and read the same memory, as lines of Python: in-place operators, ``out=``, ``foreach``,
scatters, views of other element sizes, conjugate and negative bits.

A seed gives a program; a line that torch refuses is left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SHAPES = ((), (1,), (6,), (0, 3), (1, 4), (4, 4), (4, 4), (3, 4), (2, 3, 4), (1, 2, 4, 4))
DTYPES = (
    *("float32",) * 5,
    "int64",
    "int64",
    "int32",
    "uint8",
    "float64",
    "complex64",
    "complex64",
    "bfloat16",
    "bool",
)
LIES = ("plain", "plain", "transposed", "sliced", "conjugate", "negative", "expanded")

READS = (
    *("x.clone()", "x * 2", "x + y", "x - 1", "y.to(x.dtype)", "x.contiguous()", "x.reshape(x.shape)", "x.detach()"),
    *("x.view(torch.int32)", "x.view(torch.int16)", "x.view(torch.uint8)", "x.view(torch.int64)", "x.real", "x.imag"),
    *("x.conj()", "torch._neg_view(x)", "x.resolve_conj()", "x.resolve_neg()", "torch.view_as_real(x)", "x.mH"),
    *("x.transpose(0, -1)", "x.reshape(-1)", "x.view(-1)", "x[1:]", "x[::2]", "x[0]", "x[..., -1]", "x.flip(0)"),
    *("x.diagonal()", "x.unbind(0)[-1]", "x.chunk(2)[0]", "x[None]", "x.squeeze()", "x.expand(2, *x.shape)"),
    *("x.unfold(0, 2, 1)", "x.flatten(0, 1)", "x.movedim(0, -1)", "x.narrow(0, 0, 1)"),
    *("x.sum(0)", "x.cumsum(0)", "x.argmax()", "x.t().argmin(0)", "x.sort(0, stable=True)[0]", "x.amax(-1)"),
    *("x.float()", "x.softmax(-1)", "torch.cat([x, y])", "torch.where(x > 0, x, y)", "x @ x.mT", "x.roll(1, 0)"),
    *("torch.stack([x, x])", "x.to(torch.int64)", "x == y", "x.view_as(x)", "x.float().mean()", "x.index_select(0, i)"),
)
WRITES = (
    *("x.add_(y)", "x.mul_(2)", "x.sub_(y, alpha=2)", "x.zero_()", "x.fill_(3)", "x.neg_()", "x.abs_()", "x.copy_(y)"),
    *("x.clamp_(-1, 1)", "x.lerp_(y, 0.3)", "x.addcmul_(y, y, value=2)", "x.remainder_(3)", "x.relu_()", "x.sin_()"),
    *("x.add_(x.flip(0))", "x.mul_(x.transpose(0, -1))", "x.copy_(x.flip(0))", "x.add_(x[0])", "x.cumsum_(0)"),
    *("x[1:] += x[:-1]", "x[1:] = x[:-1].clone()", "x[:] = y[:]", "x[...] = y", "x[0] = x[-1]", "x[::2] *= 2"),
    *("torch.add(x, x.roll(1, 0), out=x)", "torch.mul(x, y, out=x)", "torch.cumsum(x, 0, out=x)", "x.logical_not_()"),
    *("torch._foreach_add_([x], [x.flip(0)])", "torch._foreach_mul_([x, y], 2)", "torch._foreach_neg_([x])"),
    *("torch._foreach_add_([x, x], [y, y])", "torch._foreach_copy_([x], [y])", "torch._foreach_lerp_([x], [y], 0.5)"),
    *("x.index_copy_(0, j, 2 * x)", "x.index_put_((i,), x[0])", "x.index_add_(0, i, x[:2])", "x.index_fill_(0, i, 2)"),
    *("x[i] = y[i]", "x[i] += 1", "x.masked_fill_(x > 0, 2)", "x.masked_scatter_(x > 0, y)", "x[x > 0] = 1"),
    *("x.scatter_(0, k, y)", "x.scatter_add_(0, k, x.clone())", "x.put_(i, x[:2].reshape(-1)[:2].clone())"),
    *("x.index_reduce_(0, i, x[:2].clone(), 'amax')", "x.index_put_((i,), y[i], accumulate=True)"),
    *("x.transpose(0, -1).mul_(2)", "x.view(-1)[::2].neg_()", "x.reshape(-1)[0] = 5", "x.diagonal().add_(1)"),
    *("x.real.mul_(2)", "x.imag.zero_()", "x.conj().mul_(2j)", "torch._neg_view(x).add_(1)", "x.conj_physical_()"),
    *("x.view(torch.int32).add_(1)", "x.view(torch.uint8)[..., :1] = 3", "torch.view_as_real(x)[..., 0] = 1"),
    *("x.fill_diagonal_(5)", "x.triu_()", "x.squeeze_()", "x.unsqueeze_(0)", "x.t_()", "x.detach().mul_(3)"),
    *("x.select(0, 0).copy_(x.select(0, -1))", "x.narrow(0, 0, 1).add_(1)", "x.unbind(0)[0].mul_(3)", "x.data.add_(1)"),
    *("x.bitwise_xor_(y)", "x.pow_(2)", "x.floor_divide_(2)", "x.swapaxes_(0, -1)", "x.expand(2, *x.shape)[0].add_(1)"),
)


@dataclass(frozen=True)
class Program:
    """Lines, the shape and dtype of both arguments, how they lie when prepared and called, and what is returned."""

    seed: int
    shape: tuple[int, ...]
    dtype: str
    lies: tuple[str, ...]  # of the example, and of each call
    lines: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        body = "\n    ".join((*SET_UP, *self.lines, f"return {', '.join(self.outputs)},"))
        return (
            f"def f(v0, v1):  # {self.dtype} {list(self.shape)}, {', '.join(self.lies)}; seed {self.seed}\n    {body}"
        )

    def function(self) -> Any:
        """Return it compiled."""
        scope: dict[str, Any] = {"torch": torch}
        exec(str(self), scope)
        return scope["f"]

    def arguments(self, call: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return fresh arguments of a call, equal at each use."""
        generator = torch.Generator().manual_seed(1000 * self.seed + call)
        made = [_numbers(self.dtype, self.shape, generator) for _ in range(2)]
        return _lying(made[0], self.lies[call]), made[1]


CALLS, MOST_ELEMENTS = 4, 4096
SET_UP = (
    "i = torch.tensor([1, 0]) if v0.dim() and v0.shape[0] > 1 else torch.tensor([0])",
    "j = torch.arange(v0.shape[0] - 1, -1, -1) if v0.dim() else i",
    "k = torch.zeros(v0.shape, dtype=torch.int64)",
)


def _numbers(dtype: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_complex:
        return torch.complex(*(torch.randn(tuple(shape), generator=generator) for _ in range(2)))
    if kind.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(kind)
    return torch.randint(0 if dtype in ("uint8", "bool") else -9, 9, tuple(shape), generator=generator).to(kind)


def _lying(x: torch.Tensor, lies: str) -> torch.Tensor:
    """Return a tensor of these values that lies otherwise in memory, or carries a bit."""
    if lies == "transposed" and x.dim():
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if lies == "sliced" and x.dim():
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if lies == "conjugate" and x.is_complex():
        return x.conj_physical().conj()
    if lies == "negative" and x.dtype not in (torch.bool, torch.uint8):  # torch's copy_ widens a byte before its sign
        return torch._neg_view(-x)
    if lies == "expanded" and x.dim() and x.shape[0] > 1:
        return x[:1].expand(x.shape)
    return x


def program(seed: int) -> Program | None:
    """Return the program of a seed; None where too few of its lines run."""
    rng = random.Random(seed)
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    example = rng.choice(LIES)
    lies = (example, *(rng.choice((example, example, *LIES)) for _ in range(CALLS - 1)))
    empty = Program(seed, shape, dtype, lies, (), ())
    scope: dict[str, Any] = {"torch": torch}
    scope["v0"], scope["v1"] = empty.arguments(0)
    exec("\n".join(SET_UP), scope)
    names, lines = ["v0", "v0", "v1"], []
    for _ in range(rng.randint(3, 12)):
        chosen = {"x": rng.choice(names), "y": rng.choice(names)}
        reads = rng.random() < 0.45
        line = re.sub(r"\b[xy]\b", lambda found, of=chosen: of[found.group()], rng.choice(READS if reads else WRITES))
        new = f"v{len(set(names))}"
        line = f"{new} = {line}" if reads else line
        if dtype == "bool" and "_neg_view" in line:
            continue  # torch cannot compute its values
        try:
            exec(line, scope)
        except Exception:  # noqa: BLE001 torch refuses
            continue
        if reads and scope[new].numel() > MOST_ELEMENTS:
            continue
        names += [new] * reads
        lines.append(line)
    outputs = (names[-1], *rng.choices(names, k=rng.randint(0, 2)))
    return Program(seed, shape, dtype, lies, tuple(lines), outputs) if len(lines) > 1 else None
