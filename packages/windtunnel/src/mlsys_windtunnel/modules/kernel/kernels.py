"""Kernels between the rows of a table and stored rows (*anchors*), and distances: what the kernel methods share."""

from __future__ import annotations

from typing import Literal

import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.base import parameter
from torch import Tensor, nn

KernelKind = Literal["linear", "poly", "rbf", "sigmoid", "cosine", "laplacian"]


def squared_distances(x: Tensor, anchors: Tensor) -> Tensor:
    """Compute ``|x - a|^2`` for each row and anchor, ``[rows, anchors]``, by one matrix product.

    Both are centred on the anchors' mean first, so that a common offset of the data costs no digits.
    """
    center = anchors.detach().mean(dim=0)
    x, anchors = x - center, anchors - center
    norms = (x * x).sum(dim=1, keepdim=True) + (anchors * anchors).sum(dim=1)
    return (norms - 2 * x @ anchors.T).clamp_min(0)


def distances(x: Tensor, anchors: Tensor, p: float = 2.0) -> Tensor:
    """Compute Minkowski distances ``[rows, anchors]`` by differences: exact near zero, with a gradient of 0 there.

    Example:
        >>> distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])).tolist()
        [[5.0]]
    """
    return torch.cdist(x, anchors, p=p, compute_mode="donot_use_mm_for_euclid_dist")


class Kernel(nn.Module):
    """A kernel of each row with each anchor. Anchors, gamma and coef0 are trainable.

    Args:
        anchors: ``[anchors, features]``.
        kind: Name of the kernel in scikit-learn's ``pairwise_kernels``.
        gamma: For all but ``linear`` and ``cosine``; one over the number of features by default.
        coef0: For ``poly`` and ``sigmoid``.
        degree: For ``poly``.

    Example:
        >>> Kernel([[1.0, 0.0]], "rbf", gamma=0.5)(torch.tensor([[1.0, 0.0]], dtype=torch.float64)).tolist()
        [[1.0]]
    """

    def __init__(
        self,
        anchors: npt.ArrayLike,
        kind: KernelKind,
        *,
        gamma: float | None = None,
        coef0: float = 1.0,
        degree: float = 3.0,
    ) -> None:
        super().__init__()
        self.anchors = parameter(anchors)
        self.kind: KernelKind = kind
        if kind not in ("linear", "cosine"):
            start = 1.0 / self.anchors.shape[1] if gamma is None else float(gamma)
            self.gamma = nn.Parameter(torch.tensor(start, dtype=torch.float64))
        if kind in ("poly", "sigmoid"):
            self.coef0 = nn.Parameter(torch.tensor(float(coef0), dtype=torch.float64))
        self.degree = float(degree)

    def forward(self, x: Tensor) -> Tensor:
        """Return kernel values ``[rows, anchors]``."""
        if self.kind == "rbf":
            return torch.exp(-self.gamma * squared_distances(x, self.anchors))
        if self.kind == "laplacian":
            return torch.exp(-self.gamma * distances(x, self.anchors, p=1.0))
        if self.kind == "cosine":
            return unit(x) @ unit(self.anchors).T
        products = x @ self.anchors.T
        if self.kind == "linear":
            return products
        affine = self.gamma * products + self.coef0
        return affine.tanh() if self.kind == "sigmoid" else affine**self.degree


def unit(rows: Tensor) -> Tensor:
    """Scale rows to length one; a row of zeros stays."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / torch.where(norms == 0, 1, norms)
