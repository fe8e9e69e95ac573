"""Operators without side effects in place of those that write: ``add`` for ``add_`` and for ``add`` with ``out=``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_SPECIAL = {"__ior__": "bitwise_or", "__iand__": "bitwise_and", "__ixor__": "bitwise_xor"}


@dataclass(frozen=True, slots=True)
class Written:
    """Call that writes, expressed by an operator that does not."""

    function: Any  # an overload without side effects
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[torch.Tensor, ...]  # receive the function's results, in this order


def as_functional(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Written | None:
    """Return the call without its side effects, or None.

    None: torch has no such operator, or the call writes more than the operator's results.
    """
    function = _counterpart(func)
    if function is None:
        return None
    arguments = func._schema.arguments
    named = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    named |= {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    written = [named.get(argument.name) for argument in arguments if is_write(argument)]
    targets = tuple([leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)])
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument in function._schema.arguments:
        if not argument.kwarg_only:
            positional.append(named[argument.name])
        elif argument.name in named:
            keywords[argument.name] = named[argument.name]
    return Written(function, tuple(positional), keywords, targets)


@cache
def _counterpart(func: Any) -> Any:
    """Return the overload with the same arguments that writes none of them; None if there is none."""
    arguments = func._schema.arguments
    written = [argument for argument in arguments if is_write(argument)]
    is_out = all(argument.is_out for argument in written)
    if not is_out and written != arguments[:1]:
        return None
    namespace, _, name = func._schema.name.partition("::")
    if not is_out:
        name = _SPECIAL.get(name) or (name.removesuffix("_") if not name.endswith("__") else "")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    wanted = _signature(argument for argument in arguments if not argument.is_out)
    for overload in packet.overloads() if packet is not None else ():
        candidate = getattr(packet, overload)
        if candidate is func or any(map(is_write, candidate._schema.arguments)):
            continue
        if _signature(candidate._schema.arguments) == wanted:
            return candidate
    return None


def _signature(arguments: Any) -> list[tuple[str, str]]:
    """Return names and types, sorted: ``polygamma_`` takes its tensor first, ``polygamma`` its number."""
    return sorted((argument.name, str(argument.type)) for argument in arguments)


def is_write(argument: Any) -> bool:
    """Return whether an operator writes to an argument of its schema."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)
