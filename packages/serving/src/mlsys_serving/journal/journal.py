"""A journal: the log of what a server must know after its own death, rewritten as its records become useless."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

from mlsys_core.errors import InvalidInputError
from mlsys_core.posix import sync_folder, user_id

from mlsys_serving.journal.log_file import JournalUnavailableError, LogFile

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0
SyncPolicy = Literal["always", "interval", "never"]
SYNC_POLICIES: tuple[SyncPolicy, ...] = get_args(SyncPolicy)


class Journal:
    """Log in a folder of its own. Used from one thread; a context manager.

    The user keeps the state that the records make up, and can write it down again as a *snapshot* of fewer records:
    when the log has doubled since the last one, the snapshot takes its place in one step.

    Args:
        folder: Made with mode 0700 if it is not there.
        snapshot: Returns the records that make up the present state.
        sync: When the disk has what was written: before :meth:`kept` returns ("always"), within a second ("interval"),
            or when the system writes it ("never"). The death of processes loses nothing in any case; that of the
            machine does.
        max_nbytes: Size at most. What would make it larger is refused.
        lock_s: Seconds to wait for another writer to end.
        least_nbytes: Size up to which the log is never rewritten.
        reach: See :class:`LogFile`; further steps: "snapshot written", "snapshot placed".

    Raises:
        InvalidInputError: the folder cannot be made or written.
        JournalInUseError: it is another server's.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> with Journal(folder, lambda: []) as journal:
        ...     journal.append([b"a"])
        >>> Journal(folder, lambda: []).payloads
        [b'a']
    """

    def __init__(
        self,
        folder: Path,
        snapshot: Callable[[], Iterable[bytes]],
        *,
        sync: SyncPolicy = "interval",
        max_nbytes: int = 1 << 30,
        lock_s: float = 2.0,
        least_nbytes: int = 1 << 20,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        make_folder(folder)
        self._folder, self._snapshot = folder, snapshot
        self._sync, self._reach = sync, reach
        self._max_nbytes, self._least_nbytes = max_nbytes, least_nbytes
        self._path = folder / "journal.log"
        # Its lock, which is never renamed, says whose the folder is.
        self._owner = LogFile(folder / "owner.log", lock_s=lock_s)
        try:
            self._log = LogFile(self._path, reach=reach)
        except BaseException:
            self._owner.close()
            raise
        self.payloads = self._log.payloads
        self._rewritten_nbytes = 0  # of the last snapshot
        self._syncs = ThreadPoolExecutor(1, "mlsys-journal")
        self._syncing: Future[None] | None = None
        self._synced_s, self._is_dirty = time.monotonic(), False

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nbytes(self) -> int:
        """Size of the log."""
        return self._log.nbytes

    def append(self, payloads: Iterable[bytes]) -> None:
        """Write records, all of them or none.

        Raises:
            JournalUnavailableError: the disk is full or fails, or the journal would become larger than it may.
        """
        payloads = list(payloads)
        if self._log.nbytes > max(2 * self._rewritten_nbytes, self._least_nbytes):
            self._rewrite()
        num_more = sum(map(len, payloads))
        if self._log.nbytes + num_more > self._max_nbytes:
            self._rewrite()
            if self._log.nbytes + num_more > self._max_nbytes:
                raise JournalUnavailableError(
                    f"the journal has {self._log.nbytes} bytes, and {self._max_nbytes} is its bound: try again when "
                    "earlier requests have ended, or have the server started with a larger one"
                )
        self._log.append(payloads)
        self._is_dirty = True
        if self._sync == "interval" and time.monotonic() - self._synced_s > _INTERVAL_S:
            self._begin_sync()

    async def kept(self) -> None:
        """Wait until what was written is as safe as the sync policy says.

        Raises:
            JournalUnavailableError: the disk fails.
        """
        if self._sync == "always" and self._is_dirty:
            running = self._syncing
            if running is not None and not running.done():  # it may have begun before the last record
                await asyncio.wrap_future(running)
            if self._syncing is running or self._syncing is None:
                self._begin_sync()
            assert self._syncing is not None
            await asyncio.wrap_future(self._syncing)

    def close(self) -> None:
        """Write all to the disk and close the files; idempotent."""
        self._syncs.shutdown()
        if self._is_dirty and self._sync != "never":
            self._is_dirty = False
            self._log.sync()
        self._log.close()
        self._owner.close()

    def _begin_sync(self) -> None:
        if self._syncing is None or self._syncing.done():
            self._synced_s = time.monotonic()
            self._syncing = self._syncs.submit(self._log.sync)
            self._syncing.add_done_callback(_say_failure)

    def _rewrite(self) -> None:
        """Put the snapshot in the log's place; where there is no room for it, the log stays as it is."""
        if self._syncing is not None and not self._syncing.done():
            return  # the next record will do it
        new_path = self._folder / "journal.new"
        new_path.unlink(missing_ok=True)
        log = None
        try:
            log = LogFile(new_path, reach=self._reach)
            log.append(self._snapshot())
            if self._sync != "never":
                log.sync()
            self._reach("snapshot written")
            new_path.replace(self._path)
        except (JournalUnavailableError, InvalidInputError, OSError):
            if log is not None:
                log.close()
            new_path.unlink(missing_ok=True)
            self._rewritten_nbytes = self._log.nbytes  # not at every record
            _log.warning("there is no room to write %s anew", self._path)
            return
        self._log.close()
        log.path = self._path
        self._log, self._rewritten_nbytes = log, log.nbytes
        if self._sync != "never":
            sync_folder(self._folder)
        self._reach("snapshot placed")


def make_folder(folder: Path) -> None:
    """Make ``folder`` with mode 0700 if it is not there, and see that it can be written.

    Raises:
        InvalidInputError: it cannot.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"the folder {folder} cannot be made ({error.strerror}): give another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInputError(f"the folder {folder} cannot be written: give another, or change its mode")
    if folder.stat().st_mode & 0o077 and folder.stat().st_uid == user_id():
        folder.chmod(0o700)  # requests and answers are nobody else's


def _say_failure(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        _log.error("%s", error)
