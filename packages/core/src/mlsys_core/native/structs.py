"""Structs of a library as ctypes has them: :func:`new` fills one, every field by name; see :mod:`.declarations`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar


class Struct(ctypes.Structure):
    """Base of all structs that libraries declare; :func:`new` makes one. No attribute but its fields can be set."""

    __slots__ = ()
    names: ClassVar[frozenset[str]]
    converters: ClassVar[Mapping[str, Callable[[Any], Any]]]  # by field: from what `new` takes to what ctypes takes


S = TypeVar("S", bound=Struct)


def new(struct: type[S], **fields: Any) -> S:
    """Make a struct.

    Args:
        struct: One of ``library.structs``.
        fields: All of its fields. An enumerator is given by its name in lower case, an array by any sequence (zeros
            fill it up), a struct within this one by a dict of its fields, or None for zeros.

    Raises:
        TypeError: a field is missing, or there is none of that name.
        ValueError: an enum has no such enumerator.
    """
    if fields.keys() != struct.names:
        missing, unknown = sorted(struct.names - fields.keys()), sorted(fields.keys() - struct.names)
        raise TypeError(f"{struct.__name__}: missing fields {missing}, unknown fields {unknown}")
    for name, convert in struct.converters.items():
        fields[name] = convert(fields[name])
    return struct(**fields)


def converter(kind: Any, enumerators: tuple[str, ...]) -> Callable[[Any], Any] | None:
    """Return what turns a value for :func:`new` into one for ctypes; None: it is taken as it is."""
    if enumerators:
        return _enumerator(enumerators)
    if issubclass(kind, ctypes.Array):
        return tuple
    if issubclass(kind, Struct):
        return lambda fields: new(kind, **fields) if isinstance(fields, dict) else fields or kind()
    return None


def _enumerator(enumerators: tuple[str, ...]) -> Callable[[str], int]:
    values = {name: value for value, name in enumerate(enumerators)}

    def value_of(name: str) -> int:
        if name not in values:
            raise ValueError(f"the enumerators are {', '.join(values)}; not {name!r}")
        return values[name]

    return value_of
