"""One append-only file of records, which survives the death of its writer at any moment."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.posix import lock_file, sync_data, write_at

from mlsys_serving.journal.records import MAGIC, record, records

_log = logging.getLogger(__name__)


class JournalUnavailableError(ServingError):
    """Something could not be written down: the disk is full, or the journal has reached its bound."""

    http_status = 503
    error_code = "journal_unavailable"


class JournalInUseError(InvalidInputError):
    """Another process writes a journal."""


class LogFile:
    """File of records with a single writer. A context manager.

    Opening it cuts what a writer that died had not finished; :attr:`payloads` are the records that were there.

    Args:
        path: The file; it is made, with mode 0600, if it is not there. Its folder must be.
        lock_s: Seconds to wait for another writer to end.
        reach: Called with the names of steps: "opened", "half appended", "appended", "synced"; for tests.

    Raises:
        InvalidInputError: the file cannot be opened or written, or is no log.
        JournalInUseError: another process writes it.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "a.log"
        >>> with LogFile(path) as log:
        ...     log.append([b"one", b"two"])
        >>> LogFile(path).payloads
        [b'one', b'two']
    """

    def __init__(self, path: Path, *, lock_s: float = 2.0, reach: Callable[[str], None] = lambda _: None) -> None:
        self.path, self._reach = path, reach
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInputError(f"the journal {path} cannot be written: {error.strerror}") from error
        try:
            self._recover(lock_s)
            reach("opened")
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _recover(self, lock_s: float) -> None:
        until = time.monotonic() + lock_s
        while not _lock(self._fd):
            if time.monotonic() > until:
                raise JournalInUseError(f"another server writes the journal {self.path}: give each its own")
            time.sleep(0.01)
        data = self.path.read_bytes()
        if not MAGIC.startswith(data[: len(MAGIC)]):
            raise InvalidInputError(f"{self.path} is no journal of this version: move it away, or give another folder")
        self.payloads, self.nbytes = [], min(len(MAGIC), len(data))
        for payload, end in records(data):
            self.payloads.append(payload)
            self.nbytes = end
        if self.nbytes < len(data):
            _log.warning("%s: %d bytes at its end were not whole, and are cut", self.path, len(data) - self.nbytes)
        if self.nbytes < len(MAGIC):
            self.nbytes = 0
        os.ftruncate(self._fd, self.nbytes)

    def append(self, payloads: Iterable[bytes]) -> None:
        """Write records, all of them or none.

        Raises:
            JournalUnavailableError: the disk is full, or fails.
        """
        data = b"".join(map(record, payloads))
        if self.nbytes == 0:
            data = MAGIC + data
        try:
            self._write(data)
        except OSError as error:
            try:
                os.ftruncate(self._fd, self.nbytes)
            except OSError:  # the next writer cuts it
                _log.exception("%s cannot be cut", self.path)
            raise JournalUnavailableError(
                f"the journal cannot be written ({error.strerror}): try again later"
            ) from error
        self.nbytes += len(data)
        self._reach("appended")

    def _write(self, data: bytes) -> None:
        half = len(data) // 2
        for start, stop in ((0, half), (half, len(data))):
            at = start
            while at < stop:
                at += write_at(self._fd, memoryview(data)[at:stop], self.nbytes + at)
            if stop == half:
                self._reach("half appended")

    def sync(self) -> None:
        """Wait until the disk has what was written; from any thread.

        Raises:
            JournalUnavailableError: the disk fails.
        """
        try:
            sync_data(self._fd)
        except OSError as error:
            raise JournalUnavailableError(f"the journal is not on the disk ({error.strerror})") from error
        self._reach("synced")

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lock(fd: int) -> bool:
    return lock_file(fd, waits=False)
