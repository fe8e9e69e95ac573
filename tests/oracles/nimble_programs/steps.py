"""The steps that random programs are made of: how parameters are drawn for given shapes, and what is done.

Nothing here jumps where rounding decides: comparisons are with numbers that no sum comes to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

Shape: TypeAlias = tuple[int, ...]
Tensor: TypeAlias = torch.Tensor
Parameters: TypeAlias = Callable[..., Any]  # shapes of the values read -> strategy of a tuple


@dataclass(frozen=True)
class Step:
    """One kind of step."""

    num_values: int
    parameters: Parameters
    run: Callable[..., Tensor]


def _none(*_: Shape) -> Any:
    return st.just(())


def _dim(shape: Shape, *_: Shape) -> Any:
    return st.tuples(st.integers(0, max(len(shape) - 1, 0)))


def _dims(shape: Shape, *_: Shape) -> Any:
    some = st.lists(st.integers(0, max(len(shape) - 1, 0)), min_size=1, max_size=3, unique=True).map(sorted).map(tuple)
    return st.tuples(some, st.booleans())


def _order(shape: Shape) -> Any:
    return st.tuples(st.permutations(range(len(shape))).map(tuple))


def _number(*_: Shape) -> Any:
    return st.tuples(st.sampled_from([-2.0, 0.5, 1.0, 3.0, 0.25]))


def _part(shape: Shape, *_: Shape) -> Any:
    """dim, start, end, step."""
    dims = st.integers(0, max(len(shape) - 1, 0))
    return dims.flatmap(
        lambda dim: st.tuples(
            st.just(dim),
            st.integers(0, max(shape[dim] - 1, 0) if shape else 0),
            st.integers(1, max(shape[dim], 1) if shape else 1),
            st.sampled_from([1, 1, 2]),
        )
    )


def _sizes(shape: Shape) -> Any:
    """Other shapes of as many elements: some dimensions joined, some split."""

    def split(sizes: Shape) -> Any:
        options = [sizes, (prod(sizes),), (prod(sizes), 1), (1, prod(sizes))]
        options += [(*sizes[:d], sizes[d] * sizes[d + 1], *sizes[d + 2 :]) for d in range(len(sizes) - 1)]
        options += [
            (*sizes[:d], factor, size // factor, *sizes[d + 1 :])
            for d, size in enumerate(sizes)
            for factor in (2, 3)
            if size and size % factor == 0
        ]
        return st.sampled_from(options)

    return st.tuples(split(shape).flatmap(split) if prod(shape) else split(shape))


def _expansion(shape: Shape) -> Any:
    """Sizes of 1 grow, and dimensions come before."""
    grown = st.tuples(*(st.sampled_from([1, 2, 4]) if size == 1 else st.just(size) for size in shape))
    return st.tuples(
        st.tuples(st.lists(st.integers(1, 3), max_size=1).map(tuple), grown).map(lambda pair: pair[0] + pair[1])
    )


def _slice(x: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(start, end, step),)]


def _weight(rows: int, columns: int, like: Tensor) -> Tensor:
    return torch.linspace(-1, 1, rows * columns, dtype=torch.float64).view(rows, columns).to(like)


def _constant(like: Tensor) -> Tensor:
    """Numbers that depend on no input: passes make them once."""
    ones = torch.linspace(-1, 1, like.shape[-1] if like.dim() else 1, dtype=torch.float64, device=like.device)
    return (ones * 3).to(like.dtype).expand(like.shape)


def _conv(x: Tensor, padding: int) -> Tensor:
    return F.conv2d(x, _weight(4, x.shape[1] * 9, x).view(4, x.shape[1], 3, 3), padding=padding)


def _attend(x: Tensor, sees: int) -> Tensor:
    """Attention of a sequence to itself; the queries after `sees` see no key."""
    length = x.shape[-2]
    order = torch.arange(length, device=x.device)
    mask = (order <= order.view(-1, 1)) & (order < sees).view(-1, 1)
    return F.scaled_dot_product_attention(x, x * 0.5, x + 1, mask)


def _written(write: Callable[..., Any]) -> Callable[..., Tensor]:
    """The written tensor, after the write."""

    def run(x: Tensor, *arguments: Any) -> Tensor:
        write(x, *arguments)
        return x

    return run


def _add_to_part(x: Tensor, dim: int, start: int, end: int, step: int) -> None:
    _slice(x, dim, start, end, step).add_(1)


def _copy_to_part(x: Tensor, y: Tensor, dim: int, start: int, end: int, step: int) -> None:
    _slice(x, dim, start, end, step).copy_(y)


def _out(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    torch.add(x, y, out=out)
    return out


VIEWS = {
    "reshape": Step(1, _sizes, lambda x, sizes: x.reshape(sizes)),
    "permute": Step(1, _order, lambda x, order: x.permute(order)),
    "expand": Step(1, _expansion, lambda x, sizes: x.expand(sizes)),
    "slice": Step(1, _part, _slice),
    "select": Step(1, _dim, lambda x, dim: x.select(dim, -1)),
    "unsqueeze": Step(1, _dim, lambda x, dim: x.unsqueeze(dim)),
    "squeeze": Step(1, _none, lambda x: x.squeeze()),
    "unbind": Step(1, _dim, lambda x, dim: x.unbind(dim)[0]),
    "chunk": Step(1, _dim, lambda x, dim: x.chunk(2, dim)[-1]),
    "diagonal": Step(1, _none, lambda x: x.diagonal(0, -2, -1)),
    "unfold": Step(1, _dim, lambda x, dim: x.unfold(dim, 2, 1)),
}
JOINS = {
    "cat": Step(2, _dim, lambda x, y, dim: torch.cat([x, y], dim)),
    "cat twice": Step(1, _dim, lambda x, dim: torch.cat([x, x * 2, x], dim)),
    "cat as columns": Step(2, _none, lambda x, y: torch.cat([x.reshape(-1, 1), y.reshape(-1, 1)], 1)),
    "stack": Step(2, _dim, lambda x, y, dim: torch.stack([x, y], dim)),
    "repeat": Step(1, _dim, lambda x, dim: x.repeat([2 if d == dim else 1 for d in range(x.dim())])),
    "repeat_interleave": Step(1, _dim, lambda x, dim: x.repeat_interleave(2, dim)),
    "meshgrid": Step(2, _none, lambda x, y: torch.meshgrid(x.reshape(-1), y.reshape(-1), indexing="ij")[0]),
    "flip": Step(1, _dim, lambda x, dim: x.flip(dim)),
    "roll": Step(1, _dim, lambda x, dim: x.roll(1, dim)),
    "pad": Step(1, _number, lambda x, value: F.pad(x, (1, 0), value=value)),
}
REDUCTIONS = {
    "sum": Step(1, _dims, lambda x, dims, keeps: x.sum(dims, keeps)),
    "mean": Step(1, _dims, lambda x, dims, keeps: x.mean(dims, keeps)),
    "amax": Step(1, _dims, lambda x, dims, keeps: x.amax(dims, keeps)),
    "total": Step(1, _none, lambda x: x.sum()),
    "mean of all": Step(1, _none, lambda x: x.mean() * 2 + 1),
    "softmax": Step(1, _dim, lambda x, dim: x.softmax(dim)),
    "log_softmax": Step(1, _dim, lambda x, dim: x.log_softmax(dim)),
    "cumsum": Step(1, _dim, lambda x, dim: x.cumsum(dim)),
    "layer_norm": Step(1, _none, lambda x: F.layer_norm(x, x.shape[-1:], eps=0.1)),
    "var": Step(1, _dim, lambda x, dim: x.var(dim, unbiased=False)),
}
ELEMENTWISE = {
    "relu": Step(1, _none, lambda x: x.relu()),
    "tanh": Step(1, _none, lambda x: x.tanh()),
    "sigmoid": Step(1, _none, lambda x: x.sigmoid()),
    "silu": Step(1, _none, F.silu),
    "gelu": Step(1, _none, F.gelu),
    "exp": Step(1, _none, lambda x: (-x.square()).exp()),
    "abs": Step(1, _none, lambda x: x.abs()),
    "neg": Step(1, _none, lambda x: -x),
    "add number": Step(1, _number, lambda x, number: x + number),
    "number minus": Step(1, _number, lambda x, number: number - x),
    "times number": Step(1, _number, lambda x, number: x * number),
    "over number": Step(1, _number, lambda x, number: x / number),
    "add": Step(2, _none, lambda x, y: x + y),
    "sub": Step(2, _none, lambda x, y: x - y),
    "mul": Step(2, _none, lambda x, y: x * y.tanh()),
    "maximum": Step(2, _none, torch.maximum),
    "twice": Step(1, _none, lambda x: x + x),
    "where": Step(2, _none, lambda x, y: torch.where(x > 0.31371, x, y)),
    "masked_fill": Step(1, _none, lambda x: x.masked_fill(x > 0.7177, 0.5)),
    "float": Step(1, _none, lambda x: x.float()),
    "double": Step(1, _none, lambda x: x.double()),
    "contiguous": Step(1, _none, lambda x: x.contiguous()),
    "clone": Step(1, _none, lambda x: x.clone()),
    "constant": Step(1, _none, lambda x: _constant(x)),
    "plus constant": Step(1, _none, lambda x: x + _constant(x)),
}
PRODUCTS = {
    "linear": Step(1, _none, lambda x: F.linear(x, _weight(5, x.shape[-1], x), torch.arange(5).to(x))),
    "scores": Step(1, _none, lambda x: x @ x.mT / max(x.shape[-1], 1)),
    "matmul": Step(2, _none, lambda x, y: x @ y / max(x.shape[-1], 1)),
    "conv2d": Step(1, lambda *_: st.tuples(st.sampled_from([0, 1])), _conv),
    "max_pool2d": Step(1, _none, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool2d": Step(1, _none, lambda x: F.avg_pool2d(x, 2)),
    "pool whole": Step(1, _none, lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1)),
    "attend": Step(1, lambda *_: st.tuples(st.integers(0, 3)), _attend),
}
WRITES = {
    "add_": Step(1, _number, _written(lambda x, number: x.add_(number))),
    "mul_ by other": Step(2, _none, _written(lambda x, y: x.mul_(y))),
    "relu_": Step(1, _none, _written(lambda x: x.relu_())),
    "add_ to part": Step(1, _part, _written(_add_to_part)),
    "copy_ to part": Step(2, _part, _written(_copy_to_part)),
    "fill part": Step(1, _dim, _written(lambda x, dim: x.select(dim, 0).fill_(2))),
    "transposed write": Step(1, _none, _written(lambda x: x.mT.mul_(2))),
    "flat write": Step(1, _none, _written(lambda x: x.view(-1)[::2].neg_())),
    "out": Step(2, _none, _out),
}
STEPS: dict[str, Step] = {**VIEWS, **JOINS, **REDUCTIONS, **ELEMENTWISE, **PRODUCTS, **WRITES}
