"""Life of a server's batches: opened when its app starts, closed when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http.inside import InsideClient
from mlsys_serving.http.lifecycle import shutting_down

from mlsys_orca.api.batches.disk import Disk
from mlsys_orca.api.batches.files import FileStore
from mlsys_orca.api.batches.runner import BatchRunner
from mlsys_orca.api.batches.store import BatchStore
from mlsys_orca.api.journal_config import JournalConfig, kept_or_passing
from mlsys_orca.api.service import ModelService

_log = logging.getLogger(__name__)
_LOOK_S = 0.01  # between two looks if a request still uses the folder
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
        self._opened, self._closing = asyncio.Event(), asyncio.Event()
        self._holder: asyncio.Task[None] | None = None  # has the folder
        self._num_using = 0  # requests

    @property
    def keep_s(self) -> float:
        """Seconds for which files, and batches that have ended, are kept."""
        return _KEEP_S if self._config is None or self._config.keep_s is None else self._config.keep_s

    @asynccontextmanager
    async def open(self, app: FastAPI, *, waits: bool = False) -> AsyncIterator[None]:
        """Go on with what is there, until the context ends.

        Args:
            app: Whose routes answer.
            waits: Another server still has the folder, and is about to release it; requests wait until then.

        Raises:
            InvalidInputError: the folder cannot be written, or is another server's.
            JournalUnavailableError: the disk is full.
        """
        holder = self._holder = asyncio.create_task(self._hold(app, waits=waits))
        if not waits:
            opened = asyncio.create_task(self._opened.wait())
            await asyncio.wait({holder, opened}, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
        try:
            if holder.done():
                await holder
            yield
        finally:
            self._closing.set()
            await holder

    async def release(self) -> None:
        """Give the folder up for the next server, once no request uses it; lines that run will run again there."""
        while self._num_using:
            await asyncio.sleep(_LOOK_S)
        self._closing.set()
        if self._holder is not None:
            await asyncio.wait({self._holder})

    async def using(self) -> AsyncIterator[None]:
        """Count a request that uses the folder, while it runs; wait until it is open. A dependency of routes.

        Raises:
            HttpError: it has been released (503).
        """
        await self._opened.wait()
        if self._closing.is_set():
            raise shutting_down("another process of this server has the files and batches now; try again")
        self._num_using += 1
        try:
            yield
        finally:
            self._num_using -= 1

    async def _hold(self, app: FastAPI, *, waits: bool) -> None:
        with kept_or_passing(self._config) as config:
            while not self._closing.is_set():
                try:
                    self.disk = await asyncio.to_thread(Disk, config)
                    break
                except InvalidInputError as error:  # which came after some time
                    if not waits:
                        raise
                    _log.warning("files and batches wait: %s", error)
            else:
                return
            try:
                self.files = await asyncio.to_thread(FileStore, self.disk, keep_s=self.keep_s)
                self.store = await asyncio.to_thread(BatchStore, self.disk, keep_s=self.keep_s)
                try:
                    async with self._running(app):
                        self._opened.set()
                        await self._closing.wait()
                finally:
                    self.store.close()
            finally:
                self.disk.close()

    @asynccontextmanager
    async def _running(self, app: FastAPI) -> AsyncIterator[None]:
        inside = InsideClient(app)

        service = self.service
        self.runner = BatchRunner(self.disk, self.files, self.store, inside, service.engine, service.front)
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
