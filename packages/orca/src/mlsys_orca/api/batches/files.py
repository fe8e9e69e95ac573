"""Files of clients: a folder with each one's content, and a line of JSON about it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import IO, Literal

from mlsys_serving.http import HttpError
from pydantic import BaseModel, ValidationError

from mlsys_orca.api.batches.disk import Disk

_log = logging.getLogger(__name__)
_PIECE = 1 << 20  # bytes
Purpose = Literal["batch", "batch_output"]


class FileObject(BaseModel):
    """A file, as ``GET /v1/files/ID`` answers. Times are seconds since the epoch."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class KeptFile(BaseModel):
    """A file with what is nobody's business but the server's."""

    file: FileObject
    owner: str | None  # digest of a key; None: all


class FileStore:
    """All files of a server. Used from the event loop's thread, but for what says otherwise.

    Args:
        disk: The folders.
        keep_s: Seconds for which a file is kept, if the client did not say.
        now: Returns the time, in seconds since the epoch.
    """

    def __init__(self, disk: Disk, *, keep_s: float, now: Callable[[], float] = time.time) -> None:
        self._disk, self._keep_s, self._now = disk, keep_s, now
        self._files: dict[str, KeptFile] = {}
        for path in disk.files.glob("*.json"):
            try:
                kept = KeptFile.model_validate_json(path.read_bytes())
            except (ValidationError, OSError):
                _log.warning("%s cannot be read, and is left out", path)
                continue
            if self.path(kept.file.id).is_file():
                self._files[kept.file.id] = kept
        for path in disk.files.glob("*.jsonl"):
            if path.stem not in self._files:  # the server died between the two halves of an upload or of a deletion
                path.unlink(missing_ok=True)

    def path(self, file_id: str) -> Path:
        """Return where a file's content is."""
        return self._disk.files / f"{file_id}.jsonl"

    def all(self) -> list[KeptFile]:
        """Return all files, the oldest first."""
        return sorted(self._files.values(), key=lambda kept: (kept.file.created_at, kept.file.id))

    def get(self, file_id: str) -> KeptFile | None:
        """Return a file; None: there is none of that id."""
        return self._files.get(file_id)

    def write(
        self,
        parts: Iterable[bytes],
        *,
        filename: str,
        purpose: Purpose,
        owner: str | None,
        file_id: str | None = None,
        keep_s: float | None = None,
    ) -> KeptFile:
        """Write a new file's content and what is known of it; from any thread. :meth:`add` makes it known.

        Args:
            parts: Its content.
            filename: The client's name for it.
            purpose: Its purpose.
            owner: Digest of a key.
            file_id: Its id; None: a new one. One that is there is replaced.
            keep_s: Seconds for which it is kept; None: as all others.

        Raises:
            JournalUnavailableError: the disk is full or fails, or the files would become larger than they may.
        """
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        num = 0
        with self._disk.placing(self.path(file_id)) as content:
            for part in parts:
                self._disk.check_room(len(part))
                content.write(part)
                num += len(part)
        created = int(self._now())
        made = FileObject(
            id=file_id,
            bytes=num,
            created_at=created,
            expires_at=created + int(self._keep_s if keep_s is None else keep_s),
            filename=filename,
            purpose=purpose,
        )
        kept = KeptFile(file=made, owner=owner)
        with self._disk.placing(self._about(file_id)) as about:
            about.write(kept.model_dump_json().encode())
        return kept

    def add(self, kept: KeptFile) -> None:
        """Make a file that was written known."""
        self._files[kept.file.id] = kept

    def delete(self, file_id: str) -> None:
        """Delete a file, if there is one of that id."""
        self._files.pop(file_id, None)
        self._about(file_id).unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def delete_expired(self, in_use: Collection[str]) -> None:
        """Delete files whose time is over but for those ``in_use``."""
        for kept in self.all():
            if (kept.file.expires_at or 0) <= self._now() and kept.file.id not in in_use:
                self.delete(kept.file.id)

    def _about(self, file_id: str) -> Path:
        return self._disk.files / f"{file_id}.json"


def pieces(file: IO[bytes]) -> Iterable[bytes]:
    """Yield a file's content in pieces."""
    while piece := file.read(_PIECE):
        yield piece


def unknown_file(file_id: str) -> HttpError:
    """Return the error 404."""
    return HttpError(f"there is no file {file_id[:128]!r}", http_status=404, error_code="file_not_found", param="id")
