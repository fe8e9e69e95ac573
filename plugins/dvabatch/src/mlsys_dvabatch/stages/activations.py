"""The tensors of a batch between two stages: padded, one row for each request, or packed, one row for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy.typing as npt
import torch
from torch import Tensor


class Activations(Protocol):
    """Activations that a stage hands to the next; rows are requests."""

    @property
    def num(self) -> int:
        """Requests."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...

    def select(self, rows: Sequence[int]) -> Self:
        """Return the given rows, in the order given."""
        ...

    def join(self, others: Sequence[Self]) -> Self:
        """Return these rows and then those of the others, as one batch."""
        ...


@dataclass(frozen=True, slots=True)
class Padded:
    """Tensors by name, each ``[requests, ...]``, of one shape but for the number of requests."""

    tensors: Mapping[str, Tensor]
    extents: Mapping[str, int] = field(default_factory=dict)  # numbers that follow from the requests' sizes, by name

    @property
    def num(self) -> int:
        """Requests."""
        return int(next(iter(self.tensors.values())).shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in self.tensors.values())

    def select(self, rows: Sequence[int]) -> Padded:
        """Return the given rows: a view where they follow one another, else a copy."""
        first = rows[0]
        if list(rows) == list(range(first, first + len(rows))):
            part = {name: value[first : first + len(rows)] for name, value in self.tensors.items()}
            return Padded(part, self.extents)
        index = torch.tensor(rows, device=next(iter(self.tensors.values())).device)
        return Padded({name: value.index_select(0, index) for name, value in self.tensors.items()}, self.extents)

    def join(self, others: Sequence[Padded]) -> Padded:
        """Return one batch of all rows; copies once."""
        joined = {n: torch.cat([value, *(o.tensors[n] for o in others)]) for n, value in self.tensors.items()}
        return Padded(joined, self.extents)


@dataclass(frozen=True, slots=True)
class Packed:
    """The tokens of all requests one after another, ``[tokens, features]``, without padding."""

    tokens: Tensor
    lengths: tuple[int, ...]  # tokens of each request

    @property
    def num(self) -> int:
        """Requests."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return self.tokens.nbytes

    def select(self, rows: Sequence[int]) -> Packed:
        """Return a copy of the given rows."""
        parts = torch.split(self.tokens, list(self.lengths))
        return Packed(torch.cat([parts[row] for row in rows]), tuple(self.lengths[row] for row in rows))

    def join(self, others: Sequence[Packed]) -> Packed:
        """Return one batch of all rows; copies once."""
        tokens = torch.cat([self.tokens, *(other.tokens for other in others)])
        return Packed(tokens, sum((other.lengths for other in others), self.lengths))


def to_host(value: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values in host memory, without a copy where possible; bfloat16 becomes float32.

    NumPy has no bfloat16.
    """
    if value.dtype is torch.bfloat16:
        value = value.float()
    return value.numpy() if value.is_cpu else value.cpu().numpy()
