"""Changes by training or by an update: thresholds, leaves, scales, weights and categories, before and after.

Numbers of the same place in two modules are compared; a module that adds two copies of its trees (see
:mod:`.update_trees`) has its leaves compared in the first, its thresholds in the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from mlsys_core.errors import InvalidInputError
from torch import nn

from mlsys_windtunnel.backends.soft.trees import SoftGroupParameters, SoftTrees
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.modules.columns.scale import ElementwiseAffine, Rescale
from mlsys_windtunnel.modules.network import Network
from mlsys_windtunnel.modules.tree.ensemble import Booleans, Floats, Integers, TreeEnsemble
from mlsys_windtunnel.modules.tree.trees import Trees

SMALLEST = 1e-9  # change, relative to the size of the numbers, that counts


@dataclass(frozen=True, slots=True)
class Change:
    """Numbers of one kind in one operator, before and after."""

    operator: str
    kind: str  # threshold, leaf, scale, category, weight
    column: int | None  # that splits read or a scaler has; None: all
    before: Floats  # [numbers]
    after: Floats  # [numbers]

    @property
    def num_moved(self) -> int:
        """Count of numbers that differ."""
        unit = float(np.abs(self.before).mean()) or 1.0
        return int((np.abs(self.after - self.before) > SMALLEST * unit).sum())

    @property
    def mean(self) -> float:
        """Mean change, without its sign."""
        return float(np.abs(self.after - self.before).mean())

    @property
    def largest(self) -> float:
        """Largest change, with its sign."""
        change = self.after - self.before
        return float(change[np.abs(change).argmax()])


def what_moved(before: WindTunnelModule, after: WindTunnelModule) -> list[Change]:
    """Return what differs between two modules of the same pipeline, the largest share of moved numbers first.

    Raises:
        InvalidInputError: they are not of the same pipeline.
    """
    tunable = Tunable.of(after)
    if tunable is not None and tunable.start is not None:
        changes = list(_of_networks(tunable.start, tunable.soft))
    else:
        changes = list(_of_networks(before.network, after.network))
    found = [change for change in changes if change.num_moved]
    return sorted(found, key=lambda change: (change.kind, -change.num_moved / len(change.before), change.operator))


def _of_networks(before: Network, after: Network) -> Iterator[Change]:
    names = [[wire.name for wire in network.wires] for network in (before, after)]
    if names[0] != names[1]:
        raise InvalidInputError(f"these are two pipelines: their operators are {names[0]} and {names[1]}")
    for name, old, new in zip(names[0], before.operators, after.operators, strict=True):
        olds, news = _parts(old), _parts(new)
        if [type(part) for part in olds] != [type(part) for part in news]:
            raise InvalidInputError(f"{name} has other parts in the two: compare a module with one made from it")
        for one, other in zip(olds, news, strict=True):
            yield from _of_parts(name, one, other)


def _parts(operator: nn.Module) -> list[nn.Module]:
    """Return the modules within that hold numbers of their own."""
    return [
        part
        for part in operator.modules()
        if list(part.parameters(recurse=False)) and not isinstance(part, SoftGroupParameters)
    ]


def _of_parts(name: str, old: nn.Module, new: nn.Module) -> Iterator[Change]:
    if isinstance(old, Trees) and isinstance(new, Trees):
        yield from _of_trees(name, old.ensemble, new.ensemble)
        return
    if isinstance(old, SoftTrees) and isinstance(new, SoftTrees):
        yield from _of_soft_trees(name, old, new)
        return
    kind = "scale" if isinstance(old, ElementwiseAffine | Rescale) else "weight"
    if isinstance(old, nn.ParameterList):
        kind = "category"  # tables of embeddings, or of splits by category
    for one, other in zip(old.parameters(recurse=False), new.parameters(recurse=False), strict=True):
        if one.shape != other.shape:
            raise InvalidInputError(f"{name} has {list(one.shape)} numbers in one and {list(other.shape)} in the other")
        values = [each.detach().double().numpy(force=True).reshape(-1) for each in (one, other)]
        yield Change(name, kind, None, values[0], values[1])


def _of_trees(name: str, old: TreeEnsemble, new: TreeEnsemble) -> Iterator[Change]:
    copies = new.num_trees // old.num_trees
    if not np.array_equal(np.tile(old.feature, copies), new.feature):
        raise InvalidInputError(f"{name} has other trees in the two: compare a module with one made from it")
    last = new.threshold[len(new.threshold) - len(old.threshold) :]
    yield from _by_column(name, old.feature, old.category_set < 0, old.threshold, last)
    yield Change(name, "leaf", None, old.leaf_value.reshape(-1), new.leaf_value[: len(old.leaf_value)].reshape(-1))


def _of_soft_trees(name: str, old: SoftTrees, new: SoftTrees) -> Iterator[Change]:
    feature = old.feature.numpy(force=True)
    mean, inverse = (each.numpy(force=True) for each in (old.columns.mean, old.columns.inverse_deviation))
    scale = old.scale.double().numpy(force=True)
    is_numeric = (feature < len(mean)) & (scale > 0)
    column = np.where(is_numeric, feature, 0)
    unit = np.where(is_numeric, scale, 1.0) * inverse[column]
    values = [mean[column] + each.threshold.detach().double().numpy(force=True) / unit for each in (old, new)]
    yield from _by_column(name, feature, is_numeric, values[0], values[1])
    leaves = [
        np.concatenate([group.leaf.detach().double().numpy(force=True).reshape(-1) for group in each._groups])
        for each in (old, new)
    ]
    yield Change(name, "leaf", None, leaves[0], leaves[1])


def _by_column(name: str, feature: Integers, chosen: Booleans, before: Floats, after: Floats) -> Iterator[Change]:
    for column in np.unique(feature[chosen]).tolist():
        splits = np.flatnonzero((feature == column) & chosen)
        yield Change(name, "threshold", int(column), before[splits], after[splits])
