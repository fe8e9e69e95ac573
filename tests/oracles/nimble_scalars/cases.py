"""Operators of a tensor and a Python number: every operator, dtype and number, for tensors with and without dimensions.

torch takes the number in the tensor's dtype first, or promotes the tensor, or refuses; each as its operator has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from tests.oracles.nimble_opinfo.cases import Case

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
NUMBERS: tuple[Any, ...] = (
    *(True, 0, 1, -1, 3, 127, 300, -70000, 16777217, 2654435761, 2**40, 2**63 - 1),
    *(0.3, -2.5, 1e39, math.nan),
)
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, n: x + n,
    "radd": lambda x, n: n + x,
    "sub": lambda x, n: x - n,
    "rsub": lambda x, n: n - x,
    "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n,
    "rdiv": lambda x, n: n / x,
    "floor_divide": lambda x, n: x // n,
    "trunc_divide": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "remainder": lambda x, n: x % n,
    "fmod": torch.fmod,
    "pow": lambda x, n: x**n,
    "rpow": lambda x, n: n**x,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "ge": torch.ge,
    "clamp_min": lambda x, n: x.clamp(min=n),
    "clamp_max": lambda x, n: x.clamp(max=n),
    "clamp": lambda x, n: x.clamp(-1, n),
    "and": lambda x, n: x & n,
    "or": lambda x, n: x | n,
    "xor": lambda x, n: x ^ n,
    "shift": lambda x, n: x << n,
    "alpha": lambda x, n: torch.add(x, x, alpha=n),
    "minus alpha": lambda x, n: torch.sub(x, x, alpha=n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "lerp": lambda x, n: torch.lerp(x, x + x, n),
    "where": lambda x, n: torch.where(x == x, n, x),
    "masked_fill": lambda x, n: x.masked_fill(x == x, n),
    "full_like": lambda x, n: x + torch.full_like(x, n),
    "threshold": lambda x, n: F.threshold(x, 1, n),
    "add_": lambda x, n: x.clone().add_(n),
    "mul_": lambda x, n: x.clone().mul_(n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "leaky_relu": lambda x, n: F.leaky_relu(x, n),
}


@dataclass(frozen=True)
class Each:
    """Results of an operator for several numbers, each again with the number: fused steps round between."""

    operator: str
    numbers: tuple[Any, ...]

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Compute all."""
        run = OPERATORS[self.operator]
        once = [run(x, number) for number in self.numbers]
        return once + [run(y, number) for y, number in zip(once, self.numbers, strict=True)]


def _runs(operator: str, x: torch.Tensor, number: Any) -> bool:
    try:
        Each(operator, (number,))(x)
    except (RuntimeError, TypeError, NotImplementedError, ZeroDivisionError, OverflowError):
        return False
    return True


def tensor(dtype: str, rank: int) -> torch.Tensor:
    """Values at which dtypes end and signs change."""
    kind: torch.dtype = getattr(torch, dtype)
    if kind == torch.bool:
        values = torch.tensor([True, False, True, True, False])
    elif kind.is_floating_point or kind.is_complex:
        values = torch.tensor([1.1, -3.3, 0.0, 1e4, -0.001]).to(kind)
    else:
        info = torch.iinfo(kind)
        values = torch.tensor([info.max, info.min + 1, 1, 7, 100], dtype=kind)
    return values if rank else values[0].clone()


def cases(operator: str, dtype: str, rank: int) -> Iterator[Case]:
    """One case of all numbers that torch takes; none where it takes none."""
    x = tensor(dtype, rank)
    numbers = tuple(number for number in NUMBERS if _runs(operator, x, number))
    if numbers:
        yield Case(f"{operator} {dtype} rank {rank}", Each(operator, numbers), (x,))


def singly(case: Case) -> Iterator[Case]:
    """A case for each of its numbers."""
    assert isinstance(case.function, Each)
    for number in case.function.numbers:
        yield Case(f"{case.name}: {number!r}", Each(case.function.operator, (number,)), case.tensors)
