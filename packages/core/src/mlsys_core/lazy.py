"""Lazy references: ``"package.module:attribute"`` strings that cost nothing until they are resolved."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from mlsys_core.collector import collecting_seldom
from mlsys_core.errors import InvalidInputError, MissingDependencyError


def resolve(reference: str) -> Any:
    """Import and return the object called ``"package.module:attribute"``.

    Raises:
        InvalidInputError: the string has no colon, or the module has no such attribute.
        MissingDependencyError: the module, or something it imports, is not installed.

    Example:
        >>> resolve("math:pi") > 3
        True
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise InvalidInputError(f"{reference!r} is not a lazy reference: write 'package.module:attribute'")
    try:
        with collecting_seldom():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{reference!r} cannot be imported: {error}") from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise InvalidInputError(f"{reference!r}: {error}") from error


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package whose public names are imported when used (PEP 562).

    Args:
        package: The package's ``__name__``.
        names: By module below the package ("ir.graph"), the names that it gives to the package.
    """
    modules = {name: module for module, given in names.items() for name in given}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return resolve(f"{package}.{modules[name]}:{name}")

    def names_of() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names_of
