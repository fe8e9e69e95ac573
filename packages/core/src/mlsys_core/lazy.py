"""Lazy references: ``"package.module:attribute"`` strings that cost nothing until they are resolved."""

from __future__ import annotations

import importlib
from functools import reduce
from typing import Any

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
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{reference!r} cannot be imported: {error}") from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise InvalidInputError(f"{reference!r}: {error}") from error
