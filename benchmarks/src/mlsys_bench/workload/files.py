"""Read and write whole text files, with errors that name the file."""

from __future__ import annotations

from pathlib import Path

from mlsys_core.errors import InvalidInputError


def read_text(path: Path, what: str) -> str:
    """Return the text of ``path``, line ends kept. Raise ``InvalidInputError`` naming ``what`` if it cannot be read."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{what} cannot be read from {path}: {error}") from error


def write_text(path: Path, text: str, what: str) -> None:
    """Write ``text`` to ``path``; a file already there is replaced whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(text.encode())
        partial.replace(path)
    except OSError as error:
        raise InvalidInputError(f"{what} cannot be written to {path}: {error}") from error
