"""Arguments and results flattened to leaves: pytrees, and objects of any class by their attributes.

So a K/V cache or a configuration is an argument like any other: its content decides whether a schedule fits, its
tensors are inputs, and a replay changes it as the call does.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from mlsys_nimble.errors import refuse
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_BY_VALUE = (
    *(bool, int, str, bytes, type(None), enum.Enum, range, type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_BY_IDENTITY = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(nn.Module, torch.Generator),
)
_LEAVES = (*_BY_VALUE, *_BY_IDENTITY, float, complex, slice, np.generic, np.ndarray, torch.Tensor, frozenset)
MAX_ARRAY_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Reference:
    """Leaf in place of an object that was met before: its number in order of appearance."""

    number: int


@dataclass(frozen=True)
class Spec:
    """Hashable structure around leaves."""

    tree: TreeSpec  # pytree of registered containers
    objects: tuple[tuple[int, type, Spec], ...]  # (index of the tree's leaf, its class, the spec of its attributes)
    num_leaves: int  # total, with those inside objects


@dataclass(slots=True)
class Flat:
    """Flattened tree."""

    leaves: list[Any]
    spec: Spec
    objects: list[Any] = field(default_factory=list)  # flattened to their attributes, outer ones first


def flatten(tree: Any, known: Mapping[int, int] | None = None) -> Flat:
    """Flatten a tree into leaves.

    Args:
        tree: Nested containers and objects.
        known: Numbers by ``id`` of objects to leave whole; a :class:`Reference` of its number replaces each.

    Example:
        >>> from types import SimpleNamespace
        >>> flatten({"a": 1, "b": SimpleNamespace(c=[2, 3])}).leaves
        [1, 2, 3]
    """
    known = dict(known or {})
    found: list[Any] = []
    return _flatten(tree, known, found)


def _flatten(tree: Any, known: dict[int, int], found: list[Any]) -> Flat:
    leaves, spec = tree_flatten(tree, is_leaf=_is_size)  # torch.Size is a leaf, a registered tuple is not
    made: list[Any] = []
    objects: list[tuple[int, type, Spec]] = []
    for index, leaf in enumerate(leaves):
        if id(leaf) in known and not isinstance(leaf, _LEAVES):
            made.append(Reference(known[id(leaf)]))
        elif isinstance(leaf, _LEAVES) or (attributes := _attributes(leaf)) is None:
            made.append(leaf)
        else:
            known[id(leaf)] = len(known)
            found.append(leaf)
            inner = _flatten(attributes, known, found)
            objects.append((index, type(leaf), inner.spec))
            made += inner.leaves
    return Flat(made, Spec(spec, tuple(objects), len(made)), found)


def _is_size(item: Any) -> bool:
    return type(item) is torch.Size


def unflatten(leaves: Sequence[Any], spec: Spec, known: list[Any] | None = None) -> Any:
    """Rebuild a tree from its leaves.

    Args:
        leaves: Leaves in the order of :func:`flatten`.
        spec: Structure around them.
        known: Objects that references point to; rebuilt ones are appended.
    """
    return _unflatten(iter(leaves), spec, [] if known is None else known)


def _unflatten(rest: Iterator[Any], spec: Spec, known: list[Any]) -> Any:
    objects = {index: (cls, inner) for index, cls, inner in spec.objects}
    made: list[Any] = []
    for index in range(spec.tree.num_leaves):
        if index not in objects:
            leaf = next(rest)
            made.append(known[leaf.number] if isinstance(leaf, Reference) else leaf)
            continue
        cls, inner = objects[index]
        new = _new(cls)
        known.append(new)
        made.append(new)
        set_attributes(new, _unflatten(rest, inner, known))
    return tree_unflatten(made, spec.tree)


def _attributes(item: Any) -> dict[str, Any] | None:
    """Return an object's attributes; None if it may hold more than these."""
    if isinstance(getattr(item, "__dict__", None), dict) and not _has_slots(item):
        return dict(vars(item)) if _is_made_by_object(type(item)) else None
    if dataclasses.is_dataclass(item):
        return {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if hasattr(item, f.name)}
    return None


def _is_made_by_object(cls: Any) -> bool:
    """Return whether instances are no more than their attributes; those of a subclass of ``dict`` are more."""
    try:
        _new(cls)
    except TypeError:
        return False
    return True


def _new(cls: Any) -> Any:
    return types.SimpleNamespace() if cls is types.SimpleNamespace else object.__new__(cls)


def _has_slots(item: Any) -> bool:
    return any(vars(cls).get("__slots__") for cls in type(item).__mro__)


def set_attributes(item: Any, attributes: Mapping[str, Any]) -> None:
    """Replace an object's attributes by these."""
    if hasattr(item, "__dict__"):
        vars(item).clear()
        vars(item).update(attributes)
        return
    for name, value in attributes.items():
        object.__setattr__(item, name, value)


def is_plain(leaf: Any) -> bool:
    """Return whether a leaf hides no tensors from :func:`flatten`."""
    return isinstance(leaf, (*_LEAVES, Reference))


def attributes_of(item: Any) -> dict[str, Any]:
    """Return the current attributes of an object that :func:`flatten` can open."""
    return _attributes(item) or {}


def key_of(leaf: Any, tensor_key: Callable[[torch.Tensor], Any]) -> Any:
    """Return a leaf's key by value; a schedule fits arguments with equal keys.

    Raises:
        CaptureError: a change of the argument cannot be detected.
    """
    if isinstance(leaf, torch.Tensor):
        return tensor_key(leaf)
    if isinstance(leaf, _BY_VALUE):
        return type(leaf), leaf
    if isinstance(leaf, Reference):
        return leaf
    if isinstance(leaf, float):
        return type(leaf), float(leaf).hex()  # zero has two signs
    if isinstance(leaf, complex):
        return type(leaf), leaf.real.hex(), leaf.imag.hex()
    if isinstance(leaf, slice):
        return slice, tuple([key_of(part, tensor_key) for part in (leaf.start, leaf.stop, leaf.step)])
    if isinstance(leaf, frozenset | set):
        return type(leaf), frozenset(key_of(part, tensor_key) for part in leaf)
    if isinstance(leaf, np.generic) and not leaf.dtype.hasobject:
        return type(leaf), leaf.dtype.str, leaf.tobytes()
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject and leaf.nbytes <= MAX_ARRAY_NBYTES:
        return np.ndarray, leaf.dtype.str, leaf.shape, leaf.strides, blake2b(leaf.tobytes(), digest_size=16).digest()
    if isinstance(leaf, _BY_IDENTITY):
        return type(leaf), id(leaf), leaf
    what = f"an argument of class {type(leaf).__module__}.{type(leaf).__qualname__}"
    if isinstance(leaf, np.ndarray):
        what = f"a NumPy array of {leaf.dtype} and {leaf.nbytes:,} bytes as an argument"
    raise refuse(f"{what}: nothing tells when it changes", "", "Pass tensors, numbers, strings, or objects of these.")
