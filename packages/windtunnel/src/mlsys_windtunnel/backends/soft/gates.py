"""Choice of leaves by soft splits, in torch: path sums, then tanh as in the paper or softmax over a tree's leaves.

Tables are feature-major: ``[trees, splits, rows]`` and ``[trees, leaves, rows]``, so that a batched product over trees
has long rows.
"""

from __future__ import annotations

import torch
from mlsys_windtunnel.backends.soft.options import Gate
from torch import Tensor, nn


def leaf_weights(
    splits: Tensor, path: Tensor, count: Tensor, *, gate: Gate, scale: float, dropout: float = 0.0
) -> Tensor:
    """Return the weight of each leaf for each row, ``[trees, leaves, rows]``.

    Args:
        splits: Before tanh, ``[trees, splits, rows]``.
        path: Literals, ``[trees, leaves, splits]``.
        count: Number of literals of each leaf, ``[trees, leaves]``; huge for a leaf that is not there.
        gate: See :class:`~.options.SoftOptions`.
        scale: The inverse temperature of leaves.
        dropout: Share of outputs dropped; 0 outside of training.
    """
    output = torch.tanh(splits)
    if dropout:
        output = nn.functional.dropout(output, dropout)
    offset = count - 1 if gate == "tanh" else count
    sums = torch.baddbmm(offset.unsqueeze(2), path, output, beta=-scale, alpha=scale)
    weights = (sums.tanh() + 1) / 2 if gate == "tanh" else sums.softmax(dim=1)
    return nn.functional.dropout(weights, dropout) if dropout else weights
