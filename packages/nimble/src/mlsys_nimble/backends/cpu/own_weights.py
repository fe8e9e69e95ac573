"""Linears that read the model's own weights in place: which of them do, and what they keep.

A packed copy lies as kernels read it, but each call compares the model's weight with what it was when it was packed
(ADR 15): a pass over as many bytes again. What is read in place needs neither. One row times a weight is as fast as the
weight is read, and torch's order [O, K] suits it: a dot product of the row with each of the weight's (dots.h).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mlsys_nimble.ir.program import ValueId
from torch import Tensor

ALIGNMENT = 16  # bytes; weights that are read in place
LEAST_NBYTES = 1 << 20  # least weight; smaller ones are read faster as packed panels in the L2 cache


@dataclass(frozen=True, slots=True)
class Reader:
    """Use of an own weight by an operator that would pack it."""

    operator: int
    weight: ValueId
    nbytes: int  # size of the weight
    can_be_in_place: bool  # whether this is a linear of one row, and its kernel can read the weight


def operators_in_place(readers: Sequence[Reader]) -> frozenset[int]:
    """Return the operators that should read their weight in place: all that read a weight, or none of them.

    Args:
        readers: Uses of all own weights.

    Example:
        >>> head = Reader(operator=0, weight=1, nbytes=2_048_000, can_be_in_place=True)
        >>> operators_in_place([head])
        frozenset({0})
    """
    by_weight = defaultdict(list)
    for reader in readers:
        by_weight[reader.weight].append(reader)
    chosen = (uses for uses in by_weight.values() if all(map(_pays, uses)))
    return frozenset(reader.operator for uses in chosen for reader in uses)


def _pays(use: Reader) -> bool:
    return use.can_be_in_place and use.nbytes >= LEAST_NBYTES


class Own:
    """Hold on the memory of a weight that is the model's, whatever becomes of its parameter."""

    def __init__(self, weight: Tensor) -> None:
        self.tensor = weight.detach()


def is_readable(weight: Tensor) -> bool:
    """Return whether kernels can read a weight [O, K] where it lies: float32, row by row, aligned.

    Example:
        >>> weight = torch.zeros(8, 8)
        >>> is_readable(weight), is_readable(weight.T), is_readable(weight[:, :4])
        (True, False, False)
    """
    is_plain = weight.dtype == torch.float32 and weight.layout == torch.strided and weight.device.type == "cpu"
    return is_plain and weight.is_contiguous() and weight.data_ptr() % ALIGNMENT == 0
