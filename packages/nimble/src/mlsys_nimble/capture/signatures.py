"""Signatures of calls: the properties of arguments by which a schedule fits, and the tensors that a replay takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from mlsys_nimble.errors import refuse
from mlsys_nimble.ir import trees


def keyed(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], fixed_indices: Collection[int]
) -> tuple[Any, Sequence[torch.Tensor], Sequence[Any]]:
    """Do as :func:`read`, with autocast and another default dtype than float32 in the signature."""
    signature, inputs, objects = read(args, kwargs, fixed_indices)
    if torch._C._is_any_autocast_enabled():
        signature = signature, autocast_state()
    if torch.get_default_dtype() is not torch.float32:
        signature = signature, torch.get_default_dtype()
    return signature, inputs, objects


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
    """Return a call's arguments, flattened, with tensors that have no memory; None under autocast."""
    if torch._C._is_any_autocast_enabled():
        return None
    flat = trees.flatten((args, dict(kwargs)))
    flat.leaves = [torch.empty(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    flat.objects = []
    return flat


def autocast_state() -> tuple[tuple[bool, torch.dtype], ...]:
    """Return for CPU and CUDA whether autocast is on, and the dtype that it casts to."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _looks(tensor: torch.Tensor) -> Any:
    """Return the properties by which a schedule fits a tensor."""
    try:
        return tensor.shape, tensor.dtype, tensor.device
    except RuntimeError:
        if not tensor.is_nested:
            raise
    raise refuse("a nested tensor as an argument", "", "Pass a padded tensor and a mask: nested.to_padded_tensor(0.0).")
