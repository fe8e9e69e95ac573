"""Life of a server's batches: opened when its app starts, closed when it ends."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from fastapi import FastAPI
from mlsys_core.serving.http.inside import InsideAnswer, InsideClient

from mlsys_orca.api.batches.disk import Disk
from mlsys_orca.api.batches.files import FileStore
from mlsys_orca.api.batches.runner import BatchRunner
from mlsys_orca.api.batches.store import BatchStore
from mlsys_orca.api.journal_config import JournalConfig
from mlsys_orca.api.service import ModelService

_KEEP_S = 24 * 3600.0


class Batches:
    """Files and batches of one server, between :meth:`open` and its end.

    Args:
        service: The model that answers.
        config: Where they are; None: in a folder that is deleted at the end.
    """

    disk: Disk
    files: FileStore
    store: BatchStore
    runner: BatchRunner

    def __init__(self, service: ModelService, config: JournalConfig | None) -> None:
        self.service, self._config = service, config
        self._is_open = False

    @property
    def keep_s(self) -> float:
        """Seconds for which files, and batches that have ended, are kept."""
        return _KEEP_S if self._config is None or self._config.keep_s is None else self._config.keep_s

    @asynccontextmanager
    async def open(self, app: FastAPI) -> AsyncIterator[None]:
        """Go on with what is there, until the context ends.

        Raises:
            InvalidInputError: the folder cannot be written, or is another server's.
            JournalUnavailableError: the disk is full.
        """
        with kept_or_passing(self._config) as config:
            self.disk = await asyncio.to_thread(Disk, config)
            try:
                self.files = await asyncio.to_thread(FileStore, self.disk, keep_s=self.keep_s)
                self.store = await asyncio.to_thread(BatchStore, self.disk, keep_s=self.keep_s)
                try:
                    async with self._running(app):
                        yield
                finally:
                    self.store.close()
            finally:
                self.disk.close()

    @asynccontextmanager
    async def _running(self, app: FastAPI) -> AsyncIterator[None]:
        inside = InsideClient(app)

        async def ask(path: str, body: bytes, request_id: str) -> InsideAnswer:
            return await inside.post(path, body, request_id=request_id)

        service = self.service
        self.runner = BatchRunner(self.disk, self.files, self.store, ask, service.engine, service.front)
        self._is_open = True
        task = asyncio.create_task(self.runner.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def drain(self) -> None:
        """Begin no more lines: the server ends."""
        if self._is_open:
            self.runner.drain()


@contextmanager
def kept_or_passing(config: JournalConfig | None) -> Iterator[JournalConfig]:
    """Yield ``config``, or that of a new folder which is deleted when the context ends."""
    if config is not None:
        yield config
        return
    folder = Path(tempfile.mkdtemp(prefix="mlsys-orca-"))
    try:
        yield JournalConfig(folder=folder, sync="never")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
