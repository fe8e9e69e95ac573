"""Compiled libraries on disk: only whole files written by this user or root are ever loaded.

A library stands beside a manifest with its SHA-256 and what it was compiled by. Both are written under another name
and renamed, so a reader sees a whole file or none; one that does not match its manifest counts as absent.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlsys_core.posix import can_lock, is_own_group, lock_file, user_id

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of libraries.

    Attributes:
        folder: Made when something is first kept.
    """

    folder: Path

    def find(self, name: str) -> Path | None:
        """Return the library called ``name``; None if it is absent, damaged, or another user could have written it."""
        library = self.folder / name
        try:
            said = json.loads(_manifest(library).read_text())["sha256"]
            is_safe = not any(_is_writable_by_others(path.stat()) for path in (library, _manifest(library)))
            with library.open("rb") as file:
                is_whole = hashlib.file_digest(file, "sha256").hexdigest() == said
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            is_safe = is_whole = False
        if is_safe and is_whole:
            return library
        warn_once(f"{library} is damaged, or other users can write it: it is not loaded")
        return None

    def find_any(self, prefix: str) -> Path | None:
        """Return a library whose name begins with ``prefix``, the newest first; None if there is no sound one."""
        try:
            found = sorted(self.folder.glob(f"{prefix}*.so"), key=lambda path: -path.stat().st_mtime_ns)
        except OSError:
            return None
        return next((library for path in found if (library := self.find(path.name))), None)

    @contextmanager
    def alone(self, name: str) -> Iterator[Path]:
        """Yield a new folder to build in, to one process or thread at a time for each ``name``.

        Raises:
            OSError: nothing can be written here.
        """
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as work, (self.folder / f".{name}.lock").open("a") as lock:
            if can_lock():
                lock_file(lock.fileno())  # released with the file
            yield Path(work)

    def keep(self, built: Path, about: dict[str, str]) -> Path:
        """Move ``built`` here under its own name, with a manifest that includes ``about``; return its new path.

        Raises:
            OSError: nothing can be written here.
        """
        library = self.folder / built.name
        with built.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        manifest = _manifest(built)
        manifest.write_text(json.dumps({"sha256": digest, **about}, indent=1) + "\n")
        built.chmod(0o755)
        manifest.chmod(0o644)
        built.replace(library)
        manifest.replace(_manifest(library))
        return library


def trusted_store(folder: Path) -> Store | None:
    """Return the store in ``folder``; None, with a log line, if other users could plant libraries in it."""
    path = folder.resolve()  # links may change meanwhile: check and use the same real path
    problem = problem_of(path)
    if problem:
        warn_once(f"compiled kernels in {folder} are not used: {problem}")
        return None
    return Store(path)


def problem_of(folder: Path) -> str | None:
    """Return the reason why ``folder`` is unsafe to load code from; None if it is safe.

    The folder is a path without links that need not exist.

    It and each folder above it must belong to this user or to root. Others may write to none, but for folders above
    it with the sticky bit (/tmp), whose entries only their owners rename.
    """
    for each in (folder, *folder.parents):
        try:
            status = each.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{each} cannot be examined ({error.strerror}); set MLSYS_CACHE_DIR to a folder of your own"
        if status.st_uid not in (0, user_id()):
            return f"{each} belongs to another user ({status.st_uid}); set MLSYS_CACHE_DIR to a folder of your own"
        if _is_open(status) and (each == folder or not status.st_mode & stat.S_ISVTX):
            mode = stat.S_IMODE(status.st_mode)
            return f"other users can write to {each} (mode {mode:o}); chmod go-w it, or set MLSYS_CACHE_DIR"
    return None


def _is_writable_by_others(status: os.stat_result) -> bool:
    return status.st_uid not in (0, user_id()) or _is_open(status)


def _is_open(status: os.stat_result) -> bool:
    """Return whether anybody beside the owner and root may write; a user's private group counts as the owner."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid)


@cache
def _is_private(group_id: int) -> bool:
    return is_own_group(group_id)


def temporary_store() -> Store:
    """Return a store that lives until this process ends."""
    return Store(_temporary_folder(os.getpid()))


@cache
def _temporary_folder(process_id: int) -> Path:  # one for each process: a fork makes its own
    folder = Path(tempfile.mkdtemp(prefix="mlsys-kernels-"))
    atexit.register(_remove, folder, process_id)
    return folder


def _remove(folder: Path, process_id: int) -> None:
    if os.getpid() == process_id:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def warn_once(message: str) -> None:
    """Log ``message`` as a warning, once in a process."""
    _log.warning("%s", message)


def _manifest(library: Path) -> Path:
    return library.with_name(library.name + ".json")
