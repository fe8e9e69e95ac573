"""Life of a server's batches: opened when its engine runs, closed before that ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from mlsys_orca.api.service import ModelService

from mlsys_orca_gateway.batches.files import FileStore
from mlsys_orca_gateway.batches.runner import BatchRunner
from mlsys_orca_gateway.batches.store import BatchStore, salt_of
from mlsys_orca_gateway.inside import InsideClient
from mlsys_orca_gateway.log import Log
from mlsys_orca_gateway.options import GatewayOptions

_KEEP_S = 24 * 3600.0


class Batches:
    """Files and batches of one server, between :meth:`open` and its end.

    Args:
        service: The model that answers.
        options: Where they are.
    """

    salt: bytes  # of the hashes of keys
    files: FileStore
    store: BatchStore
    runner: BatchRunner

    def __init__(self, service: ModelService, options: GatewayOptions) -> None:
        self._service, self._options = service, options
        self._is_open = False

    @asynccontextmanager
    async def open(self, app: FastAPI, log: Log) -> AsyncIterator[None]:
        """Go on with what is there, until the context ends.

        Args:
            app: Whose routes answer.
            log: Where batches are kept.

        Raises:
            InvalidInputError: the folder cannot be written.
        """
        options, service = self._options, self._service
        keep_s = _KEEP_S if options.journal_keep is None else options.journal_keep
        self.salt = await asyncio.to_thread(salt_of, log)
        self.files = await asyncio.to_thread(FileStore, options, log, keep_s=keep_s)
        self.store = await asyncio.to_thread(BatchStore, log, keep_s=keep_s)
        inside = InsideClient(app)
        self.runner = BatchRunner(self.files, self.store, inside, service.engine, service.front, reach=options.reach)
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
