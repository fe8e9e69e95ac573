"""Errors that name the model they are about: several may be served by one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlsys_core.errors import InvalidInputError


@contextmanager
def naming(name: str | Path) -> Iterator[None]:
    """Put a model's name or path before the text of an :class:`InvalidInputError` that lacks it.

    Example:
        >>> with naming("net.onnx"):
        ...     raise InvalidInputError("the model mixes requests")
        Traceback (most recent call last):
            ...
        mlsys_core.errors.InvalidInputError: net.onnx: the model mixes requests
    """
    try:
        yield
    except InvalidInputError as error:
        if Path(name).name in str(error) or str(error).startswith(f"{Path(name).stem}: "):
            raise
        raise InvalidInputError(f"{name}: {error}") from error
