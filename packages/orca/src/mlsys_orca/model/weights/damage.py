"""Errors of the code and libraries that read a model's files, given as one line that names the file.

Model files come from anywhere. What can be foreseen is checked by name where it is read; this is the border behind
which nothing else gets through: neither a library's own exceptions, nor a panic of its compiled part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError, MlsysError

MAX_JSON_NBYTES = 16 * 1024 * 1024  # of a configuration; the largest known have half a megabyte
MAX_INDEX_NBYTES = 128 * 1024 * 1024  # of an index of shards, and of a tokenizer


@contextmanager
def readable(path: Path | str) -> Iterator[None]:
    """Raise what goes wrong inside as an error about the file or directory ``path``.

    Raises:
        InvalidInputError: for every exception but our own and those that are no fault of the file.

    Example:
        >>> with readable("config.json"):
        ...     1 // 0
        Traceback (most recent call last):
        mlsys_core.errors.InvalidInputError: config.json cannot be read, it is damaged or of an unknown kind: ...
    """
    try:
        yield
    except MlsysError:
        raise
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise InvalidInputError(f"{path} needs more memory than there is") from error
    except BaseException as error:
        # A panic in Rust comes as a class of its own, outside of Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if "out of memory" in str(error) or "can't allocate memory" in str(error):
            raise InvalidInputError(f"{path} needs more memory than there is") from error
        said = (str(error).strip().splitlines() or [""])[0][:300]
        raise InvalidInputError(
            f"{path} cannot be read, it is damaged or of an unknown kind: {type(error).__name__}: {said}"
        ) from error


def json_object(path: Path, *, max_nbytes: int = MAX_JSON_NBYTES) -> dict[str, Any]:
    """Return the object in the JSON file ``path``.

    Raises:
        InvalidInputError: it is too large, no JSON, nested too deep, or no object.
    """
    with readable(path):
        if (nbytes := path.stat().st_size) > max_nbytes:
            raise InvalidInputError(f"{path} has {nbytes:,} bytes; a file of this name has at most {max_nbytes:,}")
        return json_object_of(path.read_bytes(), path)


def json_object_of(text: bytes, path: Path | str) -> dict[str, Any]:
    """Return the object in the JSON text of the file ``path``.

    Raises:
        InvalidInputError: it is no JSON, nested too deep, or no object.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise InvalidInputError(f"{path} is no valid JSON: it is nested too deep") from error
    except ValueError as error:
        raise InvalidInputError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidInputError(f"{path} holds {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key comes twice in one object")
    return value


def inside(directory: Path, name: object) -> Path:
    """Return the path called ``name`` below ``directory``.

    Raises:
        InvalidInputError: it is no name, or leads out of the directory.

    Example:
        >>> inside(Path("model"), "../../etc/passwd")
        Traceback (most recent call last):
        mlsys_core.errors.InvalidInputError: model names the file '../../etc/passwd', which is not inside it
    """
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise InvalidInputError(f"{directory} names the file {str(name)[:100]!r}, which is not inside it")
    return directory / name
