"""Finding leaves without walking: per feature, look up which leaves a value leaves open, and intersect.

QuickScorer's idea (Lucchese et al., SIGIR 2015) with intervals in place of single comparisons. The thresholds of a
feature cut its values into bins; for every bin a table holds, for every tree, the set of leaves that the tree's splits
on that feature leave open, as a bit mask. The intersection over the features is the one leaf. So a row costs a binary
search and one contiguous copy a feature, whatever the depth: right for small trees, whose masks are short.

The tables repeat what the thresholds say: they are built anew when thresholds have changed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from mlsys_windtunnel.modules.tree.ensemble import Floats, Integers, TreeEnsemble
from torch import Tensor, nn

_MANTISSA_BITS, _EXPONENT_MASK, _EXPONENT_BIAS = 52, 0x7FF, 1023  # of a float64
_BINS_AT_ONCE = 256  # bounds the memory of building
Masks = npt.NDArray[np.uint64]


def mask_bits(ensemble: TreeEnsemble) -> int:
    """Return the bits that a tree's mask takes: 8, 16, 32, or a multiple of 64 (several words)."""
    most = int(np.diff(ensemble.leaf_start).max())
    return next((bits for bits in (8, 16, 32) if most <= bits), -(-most // 64) * 64)


def bin_edges(ensemble: TreeEnsemble, feature: int) -> Floats:
    """Return the ascending values at which splits on a feature change sides; bin b is ``(edge[b - 1], edge[b]]``."""
    splits = np.flatnonzero(ensemble.feature == feature)
    sets = ensemble.category_set[splits]
    if not (sets >= 0).any():
        return np.unique(ensemble.threshold[splits])
    most = int(np.diff(ensemble.category_start)[sets].max(initial=0))
    edges: Floats = (
        np.arange(most, dtype=np.float64) + 0.5
    )  # codes are whole; the last bin holds those that no set holds
    return edges


class BitTables(nn.Module):
    """Leaves by intersection.

    Args:
        ensemble: Trees with at least one split; :func:`mask_bits` up to 64 * 15.
    """

    features: Tensor
    edges: Tensor
    row_start: Tensor
    row_of_missing: Tensor
    table: Tensor
    bit_to_leaf: Tensor

    tree_dim = 1  # of what find() returns

    def __init__(self, ensemble: TreeEnsemble) -> None:
        super().__init__()
        features = np.unique(ensemble.feature)
        edges = [bin_edges(ensemble, feature) for feature in features]
        start = np.cumsum([0, *(len(edge) + 2 for edge in edges)])  # one bin more than edges, and one for missing
        padded = np.full((len(edges), max(map(len, edges))), np.inf)
        for row, edge in enumerate(edges):
            padded[row, : len(edge)] = edge
        self.words = max(1, mask_bits(ensemble) // 64)
        word = np.arange(self.words) * 64 - _EXPONENT_BIAS
        self.register_buffer("features", torch.from_numpy(features), persistent=False)
        self.register_buffer("edges", torch.from_numpy(padded), persistent=False)
        self.register_buffer("row_start", torch.from_numpy(start[:-1, None].copy()), persistent=False)
        self.register_buffer("row_of_missing", torch.from_numpy(start[1:, None] - 1), persistent=False)
        self.register_buffer("table", torch.from_numpy(_tables(ensemble, features, edges)), persistent=False)
        bit_to_leaf = np.repeat(ensemble.leaf_start[:-1], self.words) + np.tile(word, ensemble.num_trees)
        self.register_buffer("bit_to_leaf", torch.from_numpy(bit_to_leaf), persistent=False)

    def columns(self, x: Tensor) -> Tensor:
        """Return rows of the table, ``[features read, rows]`` int64, for clean inputs ``[rows, features]``."""
        values = x.t().contiguous().index_select(0, self.features)
        bins = torch.searchsorted(self.edges, values)
        return torch.where(values.isnan(), self.row_of_missing, bins + self.row_start)

    def find(self, columns: Tensor, threshold: Tensor) -> Tensor:
        """Find the leaf of each row in each tree, ``[rows, trees]`` int64; ``threshold`` is in the tables already."""
        first, *others = columns.unbind(0)
        alive = self.table.index_select(0, first)
        for rows in others:
            alive &= self.table.index_select(0, rows)
        # one bit is left, so the exponent of the mask as a number is the bit's index; the sign bit is no exception
        exponent = (alive.double().view(torch.int64) >> _MANTISSA_BITS).bitwise_and_(_EXPONENT_MASK)
        leaf = exponent + self.bit_to_leaf
        if self.words == 1:
            return leaf
        return (leaf * (exponent > 0)).reshape(leaf.shape[0], -1, self.words).sum(2)


def _tables(ensemble: TreeEnsemble, features: Integers, edges: list[Floats]) -> npt.NDArray[np.generic]:
    """Return masks of open leaves, ``[bins of all features, trees * words]``."""
    bits = mask_bits(ensemble)
    left, right, everything = _leaf_masks(ensemble, max(1, bits // 64))
    tree = ensemble.tree_of_split()
    parts = []
    for feature, edge in zip(features, edges, strict=True):
        splits = np.flatnonzero(ensemble.feature == feature)
        splits = splits[np.argsort(tree[splits], kind="stable")]
        trees, starts = np.unique(tree[splits], return_index=True)
        values = np.array([*edge, np.inf, np.nan])
        for begin in range(0, len(values), _BINS_AT_ONCE):
            goes_left = ensemble.goes_left(splits, values[begin : begin + _BINS_AT_ONCE])
            is_open = np.where(goes_left[:, :, None], ~right[splits, None], ~left[splits, None])
            part = np.broadcast_to(everything, (goes_left.shape[1], *everything.shape)).copy()
            part[:, trees] &= np.bitwise_and.reduceat(is_open, starts, axis=0).swapaxes(0, 1)
            parts.append(part.reshape(len(part), -1))
    table = np.concatenate(parts)
    return (
        table.astype(np.uint8) if bits == 8 else table.astype(f"u{min(bits, 64) // 8}").view(f"i{min(bits, 64) // 8}")
    )


def _leaf_masks(ensemble: TreeEnsemble, words: int) -> tuple[Masks, Masks, Masks]:
    """Return the leaves under each split's left and right child ``[splits, words]``, and those of each tree."""
    index = np.arange(len(ensemble.leaf_value)) - np.repeat(ensemble.leaf_start[:-1], np.diff(ensemble.leaf_start))
    of_leaf = np.zeros((len(index), words), np.uint64)
    of_leaf[np.arange(len(index)), index // 64] = np.uint64(1) << (index % 64).astype(np.uint64)
    of_split = np.zeros((len(ensemble.feature), words), np.uint64)

    def under(child: Integers) -> Masks:
        masks: Masks = np.where((child >= 0)[:, None], of_split[np.maximum(child, 0)], of_leaf[np.maximum(~child, 0)])
        return masks

    for level in reversed(ensemble.levels()):
        of_split[level] = under(ensemble.left[level]) | under(ensemble.right[level])
    return under(ensemble.left), under(ensemble.right), under(ensemble.root)
