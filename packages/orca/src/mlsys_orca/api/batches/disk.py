"""The folder of a server's files and batches: whose it is, how large it may be, and files that appear whole."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mlsys_core.posix import sync_folder
from mlsys_serving.journal import JournalUnavailableError, LogFile, make_folder

from mlsys_orca.api.journal_config import JournalConfig

_SALT_NBYTES = 32
_FRESH_S = 2.0  # for which a look at the folder's size holds


class Disk:
    """Folders of one server, which no other uses at the same time. Close it.

    Args:
        config: Where they are, and how large they may become.

    Raises:
        InvalidInputError: a folder cannot be written, or is another server's.
        JournalUnavailableError: the disk is full.
    """

    def __init__(self, config: JournalConfig) -> None:
        self.config = config
        self.files, self.batches = config.folder / "files", config.folder / "batches"
        for folder in (config.folder, self.files, self.batches):
            make_folder(folder)
        self._owner = LogFile(self.batches / "owner.log")  # its lock says whose the folder is
        try:
            if not self._owner.payloads:
                self._owner.payloads = [secrets.token_bytes(_SALT_NBYTES)]
                self._owner.append(self._owner.payloads)
                self._owner.sync()
        except BaseException:
            self._owner.close()
            raise
        self._used_nbytes, self._looked_s = 0, -_FRESH_S
        for left in (*self.files.glob("*.new"), *self.batches.glob("*.new")):
            left.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the folders to another server. Idempotent."""
        self._owner.close()

    def digest(self, key: bytes) -> str:
        """Return what is kept of an API key: a hash with this folder's salt."""
        return hmac.new(self._owner.payloads[0], key, hashlib.sha256).hexdigest()

    def check_room(self, num_more: int) -> None:
        """See that ``num_more`` bytes may be written.

        Raises:
            JournalUnavailableError: all would be larger than the configuration allows.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s > _FRESH_S:
            entries = [entry for folder in (self.files, self.batches) for entry in os.scandir(folder)]
            self._used_nbytes, self._looked_s = sum(map(_nbytes, entries)), now_s
        if self._used_nbytes + num_more > self.config.max_nbytes:
            raise JournalUnavailableError(
                f"files and batches have {self._used_nbytes} bytes, and {self.config.max_nbytes} is their bound: "
                "delete some, wait until ended ones are forgotten, or have the server started with a larger one"
            )
        self._used_nbytes += num_more

    @contextmanager
    def placing(self, path: Path) -> Iterator[IO[bytes]]:
        """Yield a file to write, which is at ``path`` with mode 0600 when the context ends well, or not at all.

        Raises:
            JournalUnavailableError: the disk is full, or fails.
        """
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                yield file
                file.flush()
                if self.config.sync != "never":
                    os.fsync(file.fileno())
            self.config.reach("written")
            new.replace(path)
            self.sync_folder(path.parent)
        except OSError as error:
            raise JournalUnavailableError(
                f"{path.name} cannot be written ({error.strerror}): try again later"
            ) from error
        finally:
            new.unlink(missing_ok=True)
        self.config.reach("placed")

    def sync_folder(self, folder: Path) -> None:
        """Have the disk know the names in ``folder``."""
        if self.config.sync != "never":
            sync_folder(folder)


def _nbytes(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0
