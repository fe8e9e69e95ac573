"""Files of clients: a folder with each one's content, and a row of the log about it."""

from __future__ import annotations

import os
import secrets
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from mlsys_core.posix import sync_folder
from mlsys_serving.http import HttpError
from pydantic import BaseModel

from mlsys_orca_gateway.log import Log, LogUnavailableError, make_folder
from mlsys_orca_gateway.options import GatewayOptions

_PIECE = 1 << 20  # bytes
_FRESH_S = 2.0  # for which a look at the folder's size holds
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
    """All files of a server. Made in any thread, then used from the event loop's but for what says otherwise.

    Args:
        options: Has the folder, and how large it may become.
        log: What is known of the files.
        keep_s: Seconds for which a file is kept, if the client did not say.
        now: Returns the time, in seconds since the epoch.
    """

    def __init__(
        self, options: GatewayOptions, log: Log, *, keep_s: float, now: Callable[[], float] = time.time
    ) -> None:
        self._options, self._log, self._keep_s, self._now = options, log, keep_s, now
        self._folder = options.folder / "files"
        make_folder(self._folder)
        self._used_nbytes, self._looked_s = 0, -_FRESH_S
        known = [KeptFile.model_validate_json(about) for (about,) in log.rows("SELECT about FROM files")]
        self._files = {kept.file.id: kept for kept in known if self.path(kept.file.id).is_file()}
        for path in self._folder.iterdir():
            if path.suffix != ".jsonl" or path.stem not in self._files:  # the server died in the middle of an upload
                path.unlink(missing_ok=True)

    def path(self, file_id: str) -> Path:
        """Return where a file's content is."""
        return self._folder / f"{file_id}.jsonl"

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
        """Write a new file's content; from any thread. :meth:`add` makes it known.

        Args:
            parts: Its content.
            filename: The client's name for it.
            purpose: Its purpose.
            owner: Digest of a key.
            file_id: Its id; None: a new one. One that is there is replaced.
            keep_s: Seconds for which it is kept; None: as all others.

        Raises:
            LogUnavailableError: the disk is full or fails, or the files would become larger than they may.
        """
        file_id = file_id or f"file-{uuid.uuid4().hex}"
        num = 0
        with self._placing(self.path(file_id)) as content:
            for part in parts:
                self.check_room(len(part))
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
        return KeptFile(file=made, owner=owner)

    async def add(self, *added: KeptFile) -> None:
        """Make files that were written known.

        Raises:
            LogUnavailableError: the disk is full.
        """
        rows = [(kept.file.id, kept.model_dump_json()) for kept in added]
        await self._log.kept(*(("INSERT OR REPLACE INTO files VALUES (?, ?)", row) for row in rows), durable=True)
        self._files |= {kept.file.id: kept for kept in added}

    def delete(self, file_id: str) -> None:
        """Delete a file, if there is one of that id."""
        self._files.pop(file_id, None)
        self._log.note(("DELETE FROM files WHERE id = ?", (file_id,)))
        self.path(file_id).unlink(missing_ok=True)

    def delete_expired(self, in_use: Collection[str]) -> None:
        """Delete files whose time is over but for those ``in_use``."""
        for kept in self.all():
            if (kept.file.expires_at or 0) <= self._now() and kept.file.id not in in_use:
                self.delete(kept.file.id)

    def check_room(self, num_more: int) -> None:
        """See that ``num_more`` bytes may be written; from any thread.

        Raises:
            LogUnavailableError: all would be larger than the options allow.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s > _FRESH_S:
            self._used_nbytes, self._looked_s = sum(map(_nbytes, os.scandir(self._folder))), now_s
        if self._used_nbytes + num_more > self._options.journal_size:
            raise LogUnavailableError(
                f"the files have {self._used_nbytes} bytes, and {self._options.journal_size} is their bound: delete "
                "some, wait until ended ones are forgotten, or have the server started with a larger one"
            )
        self._used_nbytes += num_more

    @contextmanager
    def _placing(self, path: Path) -> Iterator[IO[bytes]]:
        """Yield a file to write, which is at ``path`` with mode 0600 when the context ends well, or not at all."""
        new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        syncs = self._options.sync != "never"
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                yield file
                file.flush()
                if syncs:
                    os.fsync(file.fileno())
            self._options.reach("written")
            new.replace(path)
            if syncs:
                sync_folder(path.parent)
        except OSError as error:
            raise LogUnavailableError(f"{path.name} cannot be written ({error.strerror}): try again later") from error
        finally:
            new.unlink(missing_ok=True)
        self._options.reach("placed")


def _nbytes(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


def pieces(file: IO[bytes]) -> Iterable[bytes]:
    """Yield a file's content in pieces."""
    while piece := file.read(_PIECE):
        yield piece


def unknown_file(file_id: str) -> HttpError:
    """Return the error 404."""
    return HttpError(f"there is no file {file_id[:128]!r}", http_status=404, error_code="file_not_found", param="id")
