"""Signatures of calls: the properties of arguments by which a schedule fits, and the tensors that a replay takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from mlsys_nimble.errors import refuse
from mlsys_nimble.ir import trees
from mlsys_nimble.modes import unusual_modes


def read(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], fixed_indices: Collection[int]
) -> tuple[Any, Sequence[torch.Tensor], Sequence[Any]]:
    """Return the call's signature, the tensors that a replay takes, and the objects among the arguments."""
    if not kwargs and not fixed_indices and {*map(type, args)} == {torch.Tensor}:
        return tuple(map(_looks, args)), args, ()
    flat = trees.flatten((args, dict(kwargs)))
    leaves = flat.leaves
    if fixed_indices:
        leaves = [leaf for index, leaf in enumerate(leaves) if index not in fixed_indices]
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return (flat.spec, tuple([trees.key_of(leaf, _looks) for leaf in leaves])), inputs, flat.objects


def hollow(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> trees.Flat | None:
    """Return a call's arguments, flattened, with tensors that have no memory; None in unusual modes."""
    if unusual_modes():
        return None
    flat = trees.flatten((args, dict(kwargs)))
    flat.leaves = [torch.empty(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    flat.objects = []
    return flat


def _looks(tensor: torch.Tensor) -> Any:
    """Return the properties by which a schedule fits a tensor."""
    try:
        return tensor.shape, tensor.dtype, tensor.device
    except RuntimeError:
        if not tensor.is_nested:
            raise
    raise refuse("a nested tensor as an argument", "", "Pass a padded tensor and a mask: nested.to_padded_tensor(0.0).")
