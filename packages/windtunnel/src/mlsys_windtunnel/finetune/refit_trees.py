"""Leaves and thresholds of boosted trees from new rows, in closed form: which feature a split reads stays as it is.

Tree after tree, as boosting grew them: rows are routed, each split may take a threshold of its feature that tells the
new rows apart better (in the order of levels), then leaves take a Newton step. Numbers only; :mod:`.update_trees` puts
the result into a network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.modules.tree.ensemble import Booleans, Floats, Integers, TreeEnsemble

Slopes = Callable[[Floats], tuple[Floats, Floats]]  # margins [rows, outputs] to the loss's first and second derivatives

MOST_CUTS = 64  # thresholds tried for a feature, beside the source's own
TOTAL_STEP = 5.0  # shares of a Newton step that all trees of an output take together
LARGEST_STEP, SMALLEST_STEP = 0.3, 0.01
LEAF_ROWS = 25.0  # rows that speak for no change: a leaf needs as many to move half of its way
SPLIT_ROWS = 100.0  # likewise, where a threshold is chosen
SMALLEST_GAIN = 4.0  # fall of twice the loss, below that of the source's own threshold, that moves a threshold


@dataclass(frozen=True, slots=True)
class Refitted:
    """Numbers of an ensemble, fitted anew."""

    threshold: Floats  # [splits]
    leaf_value: Floats  # [leaves, 1]
    base: Floats  # [outputs]: added to the sums of leaves

    def margins(self, ensemble: TreeEnsemble, x: Floats, num_groups: int) -> Floats:
        """Return ``[rows, outputs]`` of clean rows."""
        sums = np.tile(self.base, (len(x), 1))
        for tree in range(ensemble.num_trees):
            leaves = route(ensemble, self.threshold, tree, x)
            sums[:, tree % num_groups] += self.leaf_value[leaves, 0]
        return sums


def refit_trees(
    ensemble: TreeEnsemble,
    x: Floats,
    slopes: Slopes,
    base: Floats,
    *,
    moves_thresholds: bool = False,
    leaf_value: Floats | None = None,
) -> Refitted:
    """Fit leaves, and thresholds if they are to move, on rows.

    Args:
        ensemble: Structure; each leaf has one value, trees of several outputs take turns.
        x: Clean rows ``[rows, features]``, as the trees compare them.
        slopes: Derivatives of the rows' weighted losses by margins; the loss is on the scale of a log-likelihood.
        base: Margins before the first tree, ``[outputs]``.
        moves_thresholds: Whether thresholds move as well.
        leaf_value: Values ``[leaves, 1]`` that are corrected; None: leaves begin at 0.
    """
    num_groups = len(base)
    cuts = _Cuts(ensemble, x) if moves_thresholds else None
    threshold = ensemble.threshold.copy()
    values = np.zeros((len(ensemble.leaf_value), 1)) if leaf_value is None else leaf_value.copy()
    step = float(np.clip(TOTAL_STEP * num_groups / ensemble.num_trees, SMALLEST_STEP, LARGEST_STEP))
    margins = Refitted(threshold, values, base).margins(ensemble, x, num_groups)
    for tree in range(ensemble.num_trees):
        output = tree % num_groups
        first, second = (slope[:, output] for slope in slopes(margins))
        if cuts is not None:
            _move_thresholds(ensemble, threshold, tree, cuts, first, second)
        leaves = route(ensemble, threshold, tree, x)
        start, end = ensemble.leaf_start[tree : tree + 2]
        fall = np.bincount(leaves - start, first, end - start)
        curve = np.bincount(leaves - start, second, end - start)
        own = -step * fall / (curve + LEAF_ROWS * second.mean())
        values[start:end, 0] += own
        margins[:, output] += own[leaves - start]
    return Refitted(threshold, values, base)


def route(ensemble: TreeEnsemble, threshold: Floats, tree: int, x: Floats) -> Integers:
    """Return the leaf of each row in one tree, ``[rows]``."""
    node = np.full(len(x), ensemble.root[tree], np.int64)
    active = np.flatnonzero(node >= 0)
    while len(active):
        node[active] = _children(ensemble, threshold, node[active], x[active, ensemble.feature[node[active]]])
        active = active[node[active] >= 0]
    return ~node


def _children(ensemble: TreeEnsemble, threshold: Floats, splits: Integers, values: Floats) -> Integers:
    left: Booleans = np.where(np.isnan(values), ensemble.missing_left[splits], values <= threshold[splits])
    for split in np.unique(splits[ensemble.category_set[splits] >= 0]):
        rows = splits == split
        left[rows] = ensemble.goes_left(np.array([split]), values[rows])[0]
    children: Integers = np.where(left, ensemble.left[splits], ensemble.right[splits])
    return children


class _Cuts:
    """Thresholds that may be taken, by feature, and the place of each value among them.

    A value's code is how many cuts lie below it, so it goes left of cut ``j`` where the code is ``j`` or less.
    """

    def __init__(self, ensemble: TreeEnsemble, x: Floats) -> None:
        numeric = ensemble.category_set < 0
        self.x = x
        self.of_feature: dict[int, Floats] = {}
        self.codes: dict[int, npt.NDArray[np.int32]] = {}  # -1: missing
        for feature in np.unique(ensemble.feature[numeric]).tolist():
            column = x[:, feature]
            values = np.unique(column[~np.isnan(column)])
            if len(values) < 3:  # the only threshold between two values is there already
                continue
            quantiles = np.quantile(values, np.linspace(0, 1, MOST_CUTS + 2)[1:-1], method="lower")
            of_rows = np.nanquantile(column, np.linspace(0, 1, MOST_CUTS + 2)[1:-1], method="lower")
            own = ensemble.threshold[numeric & (ensemble.feature == feature)]
            cuts = np.unique(np.concatenate([quantiles, of_rows, own]))
            self.of_feature[feature] = cuts
            self.codes[feature] = np.where(np.isnan(column), -1, np.searchsorted(cuts, column)).astype(np.int32)


def _move_thresholds(
    ensemble: TreeEnsemble, threshold: Floats, tree: int, cuts: _Cuts, first: Floats, second: Floats
) -> None:
    """Choose the thresholds of one tree anew, in place; each split sees the rows that the splits above send it."""
    penalty = SPLIT_ROWS * float(second.mean())
    waiting = [(int(ensemble.root[tree]), np.arange(len(first)))]
    while waiting:
        split, rows = waiting.pop()
        if split < 0 or len(rows) < SPLIT_ROWS:
            continue
        feature = int(ensemble.feature[split])
        if ensemble.category_set[split] < 0 and feature in cuts.codes:
            codes = cuts.codes[feature][rows]
            codes = np.where(codes < 0, 0 if ensemble.missing_left[split] else len(cuts.of_feature[feature]), codes)
            threshold[split] = _best(
                cuts.of_feature[feature], codes, threshold[split], first[rows], second[rows], penalty
            )
        children = _children(ensemble, threshold, np.full(len(rows), split), cuts.x[rows, feature])
        is_left = children == ensemble.left[split]
        waiting += [(int(ensemble.left[split]), rows[is_left]), (int(ensemble.right[split]), rows[~is_left])]


def _best(
    cuts: Floats, codes: npt.NDArray[np.int32], own: float, first: Floats, second: Floats, penalty: float
) -> float:
    """Return the cut that tells the rows apart best; the source's own unless one is better by enough."""
    fall = np.bincount(codes, first, len(cuts) + 1).cumsum()
    curve = np.bincount(codes, second, len(cuts) + 1).cumsum()
    left, right = curve[:-1], curve[-1] - curve[:-1]
    gain = fall[:-1] ** 2 / (left + penalty) + (fall[-1] - fall[:-1]) ** 2 / (right + penalty)
    stays = gain[np.searchsorted(cuts, own)]
    gain = np.where((left > penalty) & (right > penalty), gain, -np.inf)
    best = int(gain.argmax())
    return float(cuts[best]) if gain[best] > stays + SMALLEST_GAIN else own
