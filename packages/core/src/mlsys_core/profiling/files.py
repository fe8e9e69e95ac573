"""Write files so that a reader never sees half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of an empty file that replaces ``path`` when the block ends; if it raises, ``path`` is untouched.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with atomic_path(path) as part:
        ...     written = part.write_text("whole")
        >>> path.read_text()
        'whole'
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        part.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)  # mkstemp's 0600 would lock readers out
        part.replace(path)  # in the same folder, so this is one rename
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write and read; it replaces ``path`` when the block ends, and does not if the block raises.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with atomic_write(path) as file:
        ...     written = file.write(b"whole")
        >>> path.read_text()
        'whole'
    """
    with atomic_path(path) as part, part.open("w+b") as file:
        yield file
