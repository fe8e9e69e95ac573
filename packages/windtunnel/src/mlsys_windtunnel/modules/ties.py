"""Answers that rounding decides: rows as near to one stored point as to another, to the last digits.

Which of them a source takes follows from the order of its search and of its sums. An operator tells such rows in
``judged``; the network refuses them, or the source answers, where it is at hand (``module.py``).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor, nn

SHOWN = 5  # rows that a message names


class UndecidedError(InvalidInputError):
    """Rows whose answer is a tie that only the source's own search decides.

    Args:
        rows: Indices of the rows in the input.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        shown = ", ".join(map(str, rows[:SHOWN])) + (", ..." if len(rows) > SHOWN else "")
        super().__init__(
            f"rows {shown} ({len(rows):,} in all) are equally near to several points that the source stores, and these "
            "lead to different answers; only the source's own search decides between them. Ask the source, or a module "
            "that translate() has made of it in this process"
        )
        self.rows = tuple(rows)

    def moved(self, start: int) -> UndecidedError:
        """Return the error for rows that stand ``start`` rows further down."""
        return UndecidedError([row + start for row in self.rows])


def uncertainty(far: Tensor, size: Tensor, *, by_product: bool) -> Tensor:
    """Return by how much two computations of a distance may differ.

    Args:
        far: Distances, ``[rows, ...]``.
        size: Length of each row and the longest point together, ``[rows, 1, ...]``.
        by_product: True if the source expands squares of distances into a matrix product, which loses digits where
            points are long and near to each other.
    """
    eps = torch.finfo(far.dtype).eps
    of_values = max(1e-9, 16 * eps) * far + max(1e-12, 4 * eps) * size
    if not by_product:
        return of_values
    least = 8 * math.sqrt(eps) * size
    of_product = 64 * eps * size * size / torch.maximum(far, least).clamp_min(torch.finfo(far.dtype).tiny)
    return of_values + of_product


def sizes(x: Tensor, points: Tensor) -> Tensor:
    """Return the length of each row and of the longest point together, ``[rows]``."""
    together: Tensor = torch.linalg.vector_norm(x, dim=1) + torch.linalg.vector_norm(points, dim=1).amax(dim=0)
    return together


def nearest_is_unsure(far: Tensor, size: Tensor, labels: Tensor, *, by_product: bool) -> Tensor:
    """Return for which rows another label is as near as the nearest, ``[rows]`` bool.

    Args:
        far: Distances, ``[rows, points]``.
        size: Output of :func:`sizes`, ``[rows]``.
        labels: Labels of the points, ``[points]`` int64.
        by_product: See :func:`uncertainty`.

    Example:
        >>> far = torch.tensor([[1.0, 1.0], [1.0, 2.0]])
        >>> nearest_is_unsure(far, torch.ones(2), torch.tensor([0, 1]), by_product=False).tolist()
        [True, False]
    """
    least = far.amin(dim=1, keepdim=True)
    is_near = far <= least + 2 * uncertainty(least, size.unsqueeze(1), by_product=by_product)
    if not torch.compiler.is_exporting() and int(is_near.sum()) == len(far):  # one each
        return torch.zeros_like(size, dtype=torch.bool)
    return (is_near & (labels != labels[far.argmin(dim=1, keepdim=True)])).any(dim=1)


def fingerprint(module: nn.Module) -> int:
    """Return a checksum of the parameters, the same in float32 and float64: training changes it."""
    value = 0
    for tensor in module.parameters():
        value = zlib.crc32(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes(), value)
    return value
