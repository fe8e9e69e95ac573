"""Batches in the log: a row for each, and one for each request of those that run."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import HttpError, runtime_of
from mlsys_serving.http.middleware.gate import presented_keys
from starlette.requests import Request

from mlsys_orca_gateway.batches.records import KeptBatch, RequestCounts
from mlsys_orca_gateway.log import Log, Statement

SCHEMA = """
CREATE TABLE salts(salt BLOB);
INSERT INTO salts VALUES (randomblob(32));
CREATE TABLE files(id TEXT PRIMARY KEY, about TEXT NOT NULL);
CREATE TABLE batches(id TEXT PRIMARY KEY, kept TEXT NOT NULL);
CREATE TABLE results(batch TEXT, line INTEGER, has_failed INTEGER, text BLOB, PRIMARY KEY(batch, line));
"""
T = TypeVar("T")


class RunningBatch:
    """A batch that has not ended, and which of its requests have.

    Args:
        log: Where it is kept.
        kept: Its state.
        done: Requests that have ended: True if one failed.
    """

    def __init__(self, log: Log, kept: KeptBatch, done: dict[int, bool] | None = None) -> None:
        self._log, self.kept, self.done = log, kept, done or {}

    async def move(self, kept: KeptBatch) -> None:
        """Put the batch in another state, which the disk has then.

        Raises:
            LogUnavailableError: the disk is full, or fails.
        """
        await self._log.kept(_state(kept), durable=True)
        self.kept = kept

    async def add_result(self, index: int, line: bytes, *, has_failed: bool) -> None:
        """Write the end of one request, if it has not ended already.

        Raises:
            LogUnavailableError: the disk is full, or the log has reached its bound.
        """
        if index not in self.done:
            values = (self.kept.batch.id, index, has_failed, line)
            await self._log.kept(("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", values))
            self.done[index] = has_failed

    @property
    def counts(self) -> RequestCounts:
        """Numbers of its requests so far."""
        total, num_failed = self.kept.batch.request_counts.total, sum(self.done.values())
        return RequestCounts(total=total, completed=len(self.done) - num_failed, failed=num_failed)

    def line(self, index: int) -> bytes:
        """Return the line of a request that has ended; from any thread but the event loop's."""
        sql = "SELECT text FROM results WHERE batch = ? AND line = ?"
        ((text,),) = self._log.rows(sql, self.kept.batch.id, index)
        return bytes(text)


class BatchStore:
    """All batches of a server. Made in any thread, then used from the event loop's.

    Args:
        log: Where they are kept.
        keep_s: Seconds for which a batch is kept after its end.
        now: Returns the time, in seconds since the epoch.
    """

    def __init__(self, log: Log, *, keep_s: float, now: Callable[[], float] = time.time) -> None:
        self._log, self._keep_s, self._now = log, keep_s, now
        self.running: dict[str, RunningBatch] = {}  # by id, the oldest first
        self._ended: dict[str, KeptBatch] = {}
        for (text,) in log.rows("SELECT kept FROM batches ORDER BY rowid"):
            kept = KeptBatch.model_validate_json(text)
            if kept.batch.is_ended:
                self._ended[kept.batch.id] = kept
                continue
            ends = log.rows("SELECT line, has_failed FROM results WHERE batch = ?", kept.batch.id)
            done = {line: bool(has_failed) for line, has_failed in ends}
            self.running[kept.batch.id] = RunningBatch(log, kept, done)

    def all(self) -> list[KeptBatch]:
        """Return all batches with their numbers as they are now, the newest first."""
        every = [*self._ended.values(), *map(_with_counts, self.running.values())]
        return sorted(every, key=lambda kept: (kept.batch.created_at, kept.batch.id), reverse=True)

    def get(self, batch_id: str) -> KeptBatch | None:
        """Return a batch with its numbers as they are now; None: there is none of that id."""
        if (running := self.running.get(batch_id)) is not None:
            return _with_counts(running)
        return self._ended.get(batch_id)

    async def create(self, kept: KeptBatch) -> None:
        """Begin a batch, which the disk has then.

        Raises:
            LogUnavailableError: the disk is full.
        """
        await self._log.kept(
            ("INSERT INTO batches VALUES (?, ?)", (kept.batch.id, kept.model_dump_json())), durable=True
        )
        self.running[kept.batch.id] = RunningBatch(self._log, kept)

    async def end(self, running: RunningBatch, kept: KeptBatch) -> None:
        """Put a batch in its last state; its results are in its files.

        Raises:
            LogUnavailableError: the disk is full.
        """
        forget = ("DELETE FROM results WHERE batch = ?", (kept.batch.id,))
        await self._log.kept(_state(kept), forget, durable=True)
        running.kept = kept
        self._ended[kept.batch.id] = kept
        del self.running[kept.batch.id]

    def files_in_use(self) -> set[str]:
        """Return the ids of all files that a batch reads or will read, or has read and is still kept."""
        return {kept.batch.input_file_id for kept in self.all()}

    def delete_old(self) -> None:
        """Forget batches that have ended for long enough."""
        for batch_id, kept in list(self._ended.items()):
            if (kept.batch.ended_at or 0) + self._keep_s <= self._now():
                del self._ended[batch_id]
                self._log.note(("DELETE FROM batches WHERE id = ?", (batch_id,)))


def _state(kept: KeptBatch) -> Statement:
    return "UPDATE batches SET kept = ? WHERE id = ?", (kept.model_dump_json(), kept.batch.id)


def _with_counts(running: RunningBatch) -> KeptBatch:
    batch = running.kept.batch.model_copy(update={"request_counts": running.counts})
    return running.kept.model_copy(update={"batch": batch})


def unknown_batch(batch_id: str) -> HttpError:
    """Return the error 404."""
    return HttpError(f"there is no batch {batch_id[:128]!r}", http_status=404, error_code="batch_not_found", param="id")


def salt_of(log: Log) -> bytes:
    """Return the salt of the hashes of keys in a log."""
    ((salt,),) = log.rows("SELECT salt FROM salts")
    return bytes(salt)


class Caller:
    """Client of one request: files and batches belong to the key that made them.

    Args:
        request: It has passed the server's gate.
        salt: Of the hashes of keys.
    """

    def __init__(self, request: Request, salt: bytes) -> None:
        known = {key.encode() for key in runtime_of(request.app).config.api_keys}
        held = [key for key in presented_keys(request.scope["headers"]) if key in known]
        self._digests = [hmac.new(salt, key, hashlib.sha256).hexdigest() for key in held]
        self._is_anybody = not known

    @property
    def owner(self) -> str | None:
        """Digest that is noted at what the client makes; None: it belongs to all."""
        return self._digests[0] if self._digests else None

    def may_see(self, owner: str | None) -> bool:
        """Return True if something of that owner is this client's too."""
        return self._is_anybody or owner is None or owner in self._digests


def page(items: Sequence[T], *, id_of: Callable[[T], str], after: str | None, limit: int) -> tuple[list[T], bool]:
    """Return the part of a list that a client asks for, and True if more follow.

    Args:
        items: All, in the order asked for.
        id_of: Returns an item's id.
        after: Id of the last item that the client has.
        limit: Items at most.

    Raises:
        InvalidInputError: there is no item ``after``.

    Example:
        >>> page(["a", "b", "c"], id_of=str, after="a", limit=1)
        (['b'], True)
    """
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if id_of(item) == after]
        if not places:
            raise InvalidInputError(f"after: there is no {after[:128]!r} here")
        start = places[0] + 1
    return list(items[start : start + limit]), start + limit < len(items)
