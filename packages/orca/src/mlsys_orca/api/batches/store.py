"""Batches on the disk: a log for each that runs, one small file for each that has ended."""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import HttpError
from mlsys_serving.journal import JournalUnavailableError, LogFile
from mlsys_serving.journal.records import records
from pydantic import ValidationError

from mlsys_orca.api.batches.disk import Disk
from mlsys_orca.api.batches.records import KeptBatch, RequestCounts, result_of, result_record, state_of, state_record

_log = logging.getLogger(__name__)
_NOTE_NBYTES = 1 << 16  # kept free for the states of batches, when results find no room


class NothingToldError(InvalidInputError):
    """A log has no state in it: its server died before anybody heard of the batch."""


class RunningBatch:
    """A batch that has not ended: its log, and which of its requests have.

    Args:
        disk: The folders.
        path: Of the log.
        kept: Its state, of a new batch; None: as the log says.

    Raises:
        NothingToldError: the log says nothing.
        InvalidInputError: it cannot be opened.
        JournalUnavailableError: the disk is full.
    """

    def __init__(self, disk: Disk, path: Path, kept: KeptBatch | None = None) -> None:
        self._disk = disk
        self.log, self.is_ended = LogFile(path, reach=disk.config.reach), False
        self.done: dict[int, bool] = {}  # by request: True if it failed
        try:
            for payload in self.log.payloads:
                if (state := state_of(payload)) is not None:
                    self.kept = state
                elif (result := result_of(payload)) is not None:
                    self.done.setdefault(*result)
            self.log.payloads = []
            if kept is not None:
                self.note(kept)
            elif not hasattr(self, "kept"):
                raise NothingToldError(f"{path} says nothing of its batch")
        except BaseException:
            self.log.close()
            raise

    def note(self, kept: KeptBatch) -> None:
        """Write the batch's new state; :meth:`synced` waits until the disk has it.

        Raises:
            JournalUnavailableError: the disk is full.
        """
        self.log.append([state_record(kept)])
        self.kept = kept

    async def synced(self) -> None:
        """Wait until the disk has all that was written, unless it need not; other work goes on meanwhile.

        Raises:
            JournalUnavailableError: the disk fails.
        """
        if self._disk.config.sync == "never":
            return
        try:
            await asyncio.to_thread(self.log.sync)
        except JournalUnavailableError:
            if not self.is_ended:  # else a smaller file, which the disk has, has taken the log's place meanwhile
                raise

    def add_result(self, index: int, line: bytes, *, has_failed: bool) -> None:
        """Write the end of one request, if it has not ended already.

        Raises:
            JournalUnavailableError: the disk is full, or the batches have reached their bound.
        """
        if index in self.done:
            return
        payload = result_record(index, line, has_failed=has_failed)
        self._disk.check_room(len(payload) + _NOTE_NBYTES)
        self.log.append([payload])
        self.done[index] = has_failed

    @property
    def counts(self) -> RequestCounts:
        """Numbers of its requests so far."""
        total, num_failed = self.kept.batch.request_counts.total, sum(self.done.values())
        return RequestCounts(total=total, completed=len(self.done) - num_failed, failed=num_failed)

    @contextmanager
    def lines(self) -> Iterator[Callable[[int], bytes]]:
        """Yield a function that returns the line of a request that has ended; from any thread."""
        places: dict[int, tuple[int, int]] = {}
        with self.log.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            with memoryview(content) as view:
                for payload, end in records(view):
                    if (result := result_of(payload)) is not None:
                        places.setdefault(result[0], (end - len(payload) + 6, end))
            yield lambda index: content[slice(*places[index])]


class BatchStore:
    """All batches of a server. Used from the event loop's thread.

    Args:
        disk: The folders.
        keep_s: Seconds for which a batch is kept after its end.
        now: Returns the time, in seconds since the epoch.
    """

    def __init__(self, disk: Disk, *, keep_s: float, now: Callable[[], float] = time.time) -> None:
        self._disk, self._keep_s, self._now = disk, keep_s, now
        self.running: dict[str, RunningBatch] = {}  # by id, the oldest first
        self._ended: dict[str, KeptBatch] = {}
        for path in disk.batches.glob("*.json"):
            try:
                kept = KeptBatch.model_validate_json(path.read_bytes())
            except (ValidationError, OSError):
                _log.warning("%s cannot be read, and is left out", path)
                continue
            self._ended[kept.batch.id] = kept
            self._log_path(kept.batch.id).unlink(missing_ok=True)
        found = []
        for path in disk.batches.glob("batch_*.log"):
            try:
                found.append(RunningBatch(disk, path))
            except NothingToldError:
                path.unlink()
            except (InvalidInputError, ValidationError) as error:
                _log.warning("%s: this batch is left out", error)
                path.rename(path.with_suffix(".bad"))
        for running in sorted(found, key=lambda each: each.kept.batch.created_at):
            self.running[running.kept.batch.id] = running

    def close(self) -> None:
        """Close the logs. Idempotent."""
        for running in self.running.values():
            running.log.close()

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
        """Begin a batch, and wait until the disk has it.

        Raises:
            JournalUnavailableError: the disk is full, or the batches have reached their bound.
        """
        self._disk.check_room(_NOTE_NBYTES)
        path = self._log_path(kept.batch.id)
        try:
            running = RunningBatch(self._disk, path, kept)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        try:
            await running.synced()
            await asyncio.to_thread(self._disk.sync_folder, path.parent)
        except BaseException:
            running.log.close()
            path.unlink(missing_ok=True)
            raise
        self.running[kept.batch.id] = running

    async def end(self, running: RunningBatch, kept: KeptBatch) -> None:
        """Put a batch's last state in the place of its log.

        Raises:
            JournalUnavailableError: the disk is full.
        """
        batch_id = kept.batch.id
        await asyncio.to_thread(self._write_end, kept)
        running.kept = kept
        self._ended[batch_id] = kept
        del self.running[batch_id]
        running.is_ended = True
        running.log.close()
        self._log_path(batch_id).unlink(missing_ok=True)

    def _write_end(self, kept: KeptBatch) -> None:
        with self._disk.placing(self._disk.batches / f"{kept.batch.id}.json") as file:
            file.write(kept.model_dump_json().encode())

    def files_in_use(self) -> set[str]:
        """Return the ids of all files that a batch reads or will read, or has read and is still kept."""
        return {kept.batch.input_file_id for kept in self.all()}

    def delete_old(self) -> None:
        """Forget batches that have ended for long enough."""
        for batch_id, kept in list(self._ended.items()):
            if (kept.batch.ended_at or 0) + self._keep_s <= self._now():
                del self._ended[batch_id]
                (self._disk.batches / f"{batch_id}.json").unlink(missing_ok=True)

    def _log_path(self, batch_id: str) -> Path:
        return self._disk.batches / f"{batch_id}.log"


def _with_counts(running: RunningBatch) -> KeptBatch:
    batch = running.kept.batch.model_copy(update={"request_counts": running.counts})
    return running.kept.model_copy(update={"batch": batch})


def unknown_batch(batch_id: str) -> HttpError:
    """Return the error 404."""
    return HttpError(f"there is no batch {batch_id[:128]!r}", http_status=404, error_code="batch_not_found", param="id")
