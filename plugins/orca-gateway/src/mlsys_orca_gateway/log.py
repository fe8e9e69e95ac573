"""The database of one server, which survives the death of its writer at any moment: SQLite in WAL mode.

One thread writes. A transaction is in the file whole or not at all, under SQLite's own checksums; what a killed writer
had not committed is not there. What several callers write at the same time is one transaction.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.posix import user_id

_log = logging.getLogger(__name__)
_INTERVAL_S = 1.0  # between two times that the disk has all that was written
_GATHER_S = 0.002  # for which notes, which nobody waits for, gather before they are one transaction
_APPLICATION, _VERSION = 0x6D6C7379, 1  # of the file: whose it is, and the version of its tables
SyncPolicy = Literal["always", "interval", "never"]
SYNC_POLICIES: tuple[SyncPolicy, ...] = get_args(SyncPolicy)
_SYNCHRONOUS = {"always": "FULL", "interval": "NORMAL", "never": "OFF"}
Statement = tuple[str, Sequence[Any]]  # SQL, and the values of its question marks


class LogUnavailableError(ServingError):
    """Something could not be written down: the disk is full, or the log has reached its bound."""

    http_status = 503
    error_code = "journal_unavailable"


@dataclass(slots=True)
class _Job:
    statements: Sequence[Statement]
    is_durable: bool = False  # the disk has it before the job is done, unless the policy is "never"
    is_query: bool = False  # one statement, whose rows are the result
    done: Future[Any] | None = field(default_factory=Future)  # None: nobody waits

    @property
    def nbytes(self) -> int:
        """Bytes that it adds: of its blobs."""
        return sum(len(value) for _, values in self.statements for value in values if isinstance(value, bytes))


class Log:
    """Database with a single writer; used from any thread. Close it.

    Args:
        path: The file; it is made, with mode 0600, if it is not there. Its folder must be.
        schema: SQL that makes the tables of a new file.
        sync: When the disk has what was written: before :meth:`kept` returns ("always"), within a second ("interval"),
            or when the system writes it ("never"). The death of processes loses nothing in any case; that of the
            machine does.
        max_nbytes: Size at most. What would make it larger is refused.
        lock_s: Seconds to wait for another writer to end.
        reach: Called with the names of steps: "opened", "half appended", "appended", "synced"; for tests.

    Raises:
        InvalidInputError: the file cannot be opened or written, is another server's, damaged, or no log.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp()) / "a.sqlite3"
        >>> with Log(path, "CREATE TABLE names(name TEXT)") as log:
        ...     log.write(("INSERT INTO names VALUES (?)", ["one"])).result()
        >>> Log(path, "").rows("SELECT name FROM names")
        [('one',)]
    """

    def __init__(
        self,
        path: Path,
        schema: str,
        *,
        sync: SyncPolicy = "interval",
        max_nbytes: int = 1 << 30,
        lock_s: float = 2.0,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path, self._sync, self._max_nbytes, self._reach = path, sync, max_nbytes, reach
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._unwritten: list[_Job] = []  # notes that found no room
        self._is_closing = self._is_dirty = self._is_failing = False
        self._synced_s = time.monotonic()
        self._db = _opened(path, schema, sync=sync, lock_s=lock_s)
        (num_tables,) = self._db.execute("SELECT count(*) FROM sqlite_schema WHERE rootpage > 0").fetchone()
        self._empty_nbytes: int = (num_tables + 1) * self._pragma("page_size")
        reach("opened")
        self._thread = threading.Thread(target=self._run, name="mlsys-log", daemon=True)
        self._thread.start()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, *statements: Statement, durable: bool = False) -> Future[None]:
        """Have statements executed, all of them or none; the result tells when they are.

        Args:
            statements: In order.
            durable: The disk has them then, unless the policy is "never".

        Raises:
            LogUnavailableError: raised by the result; the disk is full or fails, or the log has reached its bound.
        """
        return self._add(_Job(statements, durable))

    async def kept(self, *statements: Statement, durable: bool = False) -> None:
        """Wait until statements are executed; see :meth:`write`. Cancelling the wait does not cancel them.

        Raises:
            LogUnavailableError: as :meth:`write`.
        """
        await asyncio.shield(asyncio.wrap_future(self.write(*statements, durable=durable)))

    def note(self, *statements: Statement) -> None:
        """Have statements executed soon; where they cannot be, they are tried again later. Does nothing once closed."""
        with suppress(LogUnavailableError):
            self._add(_Job(statements, done=None))

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query, which sees all that was written before."""
        return list(self._add(_Job([(sql, values)], is_query=True)).result())

    @property
    def nbytes(self) -> int:
        """Size of what the tables hold, without what deleted rows have left."""
        return int(self._add(_Job([("used", ())], is_query=True)).result())

    def close(self) -> None:
        """Write all there is to the disk and close the file; idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _add(self, job: _Job) -> Future[Any]:
        with self._changed:
            if self._is_closing:
                raise LogUnavailableError("the journal is closed: the server ends")
            self._jobs.append(job)
            self._changed.notify()
        return job.done or Future()

    # --- the writer's thread

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            with self._changed:
                if not self._jobs and not self._is_closing:
                    self._changed.wait(_INTERVAL_S if self._is_dirty or self._unwritten else None)
                if self._jobs and all(job.done is None for job in self._jobs) and not self._is_closing:
                    self._changed.wait(_GATHER_S)
                jobs, self._jobs, is_closing = [*self._unwritten, *self._jobs], [], self._is_closing
                self._unwritten = []
            self._carry_out([job for job in jobs if not job.is_query])
            for job in jobs:
                if job.is_query:
                    self._answer(job)
            if self._is_dirty and (is_closing or time.monotonic() - self._synced_s > _INTERVAL_S):
                self._checkpoint()
        self._db.close()

    def _carry_out(self, jobs: list[_Job]) -> None:
        try:
            self._commit(jobs)
        except LogUnavailableError as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._carry_out([job])
            elif jobs[0].done is None:
                if not self._is_failing:
                    _log.error("what clients got is not written down: %s", error)
                self._unwritten += jobs
                self._is_failing = True
            else:
                jobs[0].done.set_exception(error)
        else:
            self._is_failing = False if jobs else self._is_failing
            for job in jobs:
                if job.done is not None:
                    job.done.set_result(None)

    def _commit(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        num_more = sum(job.nbytes for job in jobs)
        if num_more and self._used() + num_more > self._max_nbytes:
            raise LogUnavailableError(
                f"the journal has {self._used()} bytes, and {self._max_nbytes} is its bound: try again when earlier "
                "requests have ended, or have the server started with a larger one"
            )
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for job in jobs:
                for sql, values in job.statements:
                    self._db.execute(sql, values)
                self._reach("half appended")
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise LogUnavailableError(f"the journal cannot be written ({error}): try again later") from error
        for _ in jobs:
            self._reach("appended")
        self._is_dirty = self._sync == "interval"
        if self._sync == "always":
            self._reach("synced")
        elif self._is_dirty and any(job.is_durable for job in jobs) and not self._checkpoint():
            raise LogUnavailableError("the journal is not on the disk: try again later")

    def _checkpoint(self) -> bool:
        """Have the disk know all that was written; return False if it fails."""
        self._synced_s = time.monotonic()
        try:
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            _log.error("the journal is not on the disk: %s", error)
            return False
        self._is_dirty = False
        self._reach("synced")
        return True

    def _answer(self, job: _Job) -> None:
        assert job.done is not None
        ((sql, values),) = job.statements
        try:
            job.done.set_result(self._used() if sql == "used" else self._db.execute(sql, values).fetchall())
        except sqlite3.Error as error:
            job.done.set_exception(LogUnavailableError(f"the journal cannot be read ({error}): try again later"))

    def _used(self) -> int:
        num_pages = self._pragma("page_count") - self._pragma("freelist_count")
        return max(0, num_pages * self._pragma("page_size") - self._empty_nbytes)

    def _pragma(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])


def _opened(path: Path, schema: str, *, sync: SyncPolicy, lock_s: float) -> sqlite3.Connection:
    """Return the connection to a log, which nobody else has while it is open."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise InvalidInputError(f"the journal {path} cannot be written: {error.strerror}") from error
    db = sqlite3.connect(path, timeout=lock_s, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[sync]}")
        db.execute("BEGIN IMMEDIATE")  # takes the lock
        (application,), (version,) = (
            db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        if not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            for statement in (*schema.split(";"), f"PRAGMA application_id = {_APPLICATION}"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {_VERSION}")
        elif (application, version) != (_APPLICATION, _VERSION):
            raise sqlite3.DatabaseError("it was written by another program or version")
        db.execute("COMMIT")
        if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {found}")
    except sqlite3.OperationalError as error:
        db.close()
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise InvalidInputError(f"another server writes the journal {path}: give each its own") from error
        raise InvalidInputError(f"the journal {path} cannot be written: {error}") from error
    except sqlite3.Error as error:
        db.close()
        raise InvalidInputError(
            f"{path} is no journal of this version ({error}): move it away, or give another folder"
        ) from error
    return db


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
