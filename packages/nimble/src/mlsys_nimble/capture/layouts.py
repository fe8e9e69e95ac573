"""Layouts of tensors in memory: copies that keep them, and what a schedule depends on of them.

``x.reshape(-1)`` is a view for some strides of x and a copy for others. So what a write reaches, and which results
share memory, may depend on the strides of the inputs. Tensors of which that is not known are :class:`Kin`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch

MAY_BE_VIEWS = frozenset(
    {"reshape", "reshape_as", "flatten", "ravel", "contiguous", "to", "type_as", "resolve_conj", "resolve_neg"}
)
ASKS_STRIDES = frozenset({"stride", "is_contiguous", "is_non_overlapping_and_dense", "dim_order", "as_strided"})


class Kin:
    """Set of groups of tensors that share memory for some strides of the inputs."""

    __slots__ = ("_parent", "is_unsure", "is_written")

    def __init__(self) -> None:
        self._parent: Self | None = None
        self.is_unsure = False  # an operator that is a view for some strides alone has joined them
        self.is_written = False  # one was written to in place

    def root(self) -> Self:
        """Return the one that stands for the whole set."""
        found = self
        while found._parent is not None:
            found = found._parent
        return found

    def join(self, other: Self) -> None:
        """Make one set of two."""
        one, two = self.root(), other.root()
        one.is_unsure = True
        if one is not two:
            one.is_written |= two.is_written
            two._parent = one


def depends_on_strides(unsure: Iterable[Kin], held: Iterable[Kin]) -> bool:
    """Return whether other strides of the inputs may change what a write reaches, or which tensors share memory.

    Args:
        unsure: Sets that an operator has joined which is a view for some strides alone.
        held: Sets of the inputs, constants and results, each as often as it has such tensors.
    """
    if any(kin.root().is_written for kin in unsure):
        return True
    roots = [kin.root() for kin in held]
    return any(root.is_unsure and sum(other is root for other in roots) > 1 for root in roots)


def layout_of(tensors: Sequence[torch.Tensor], *, is_exact: bool) -> Any:
    """Return a key of the tensors' layouts; None if all lie row by row, unless it is to be exact."""
    if not is_exact and all(each.is_contiguous() and not each.is_conj() and not each.is_neg() for each in tensors):
        return None
    return tuple([(each.stride(), each.is_conj(), each.is_neg()) for each in tensors])


def copied(tensor: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor of the same strides in memory of its own, with these values or else the tensor's.

    Example:
        >>> copied(torch.ones(1, 2).expand(3, 2)).stride()
        (0, 1)
    """
    source = tensor if values is None else values
    if tensor.layout is not torch.strided or tensor.is_nested or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return source.clone()
    with torch.no_grad():
        if tensor.is_conj():
            return copied(tensor.conj(), source.conj()).conj()
        if tensor.is_neg():
            return torch._neg_view(copied(torch._neg_view(tensor), torch._neg_view(source)))
        one = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()])
        kept = tensor[one] if 0 in tensor.stride() and tensor.dim() else tensor
        if overlaps_itself(kept):
            span = sum((size - 1) * stride for size, stride in zip(kept.shape, kept.stride(), strict=True)) + 1
            return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
        made = torch.empty_strided(kept.shape, kept.stride(), dtype=tensor.dtype, device=tensor.device)
        made.copy_(source[one] if kept is not tensor else source)
        return made if kept is tensor else made.as_strided(tensor.shape, tensor.stride())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory, but for dimensions of stride 0 (``expand``)."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
