"""Load what has changed on disk while the server runs: models that are new, that are others, and that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError, MlsysError

if TYPE_CHECKING:
    from mlsys_serving.oip.models.repository import ModelRepository


class Poller:
    """Looks at a repository's source again and again.

    A model is loaded once its files are others than when it was loaded, and were the same in two looks: who copies
    files has ended then. One that cannot be loaded is tried again when its files change.

    Args:
        repository: With a source that can be watched.

    Raises:
        InvalidInputError: It has another source, or none.
    """

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        if repository.stamps() is None:
            raise InvalidInputError("these models cannot be watched for changes: leave the option out")
        self._loaded: dict[str, Hashable] = dict(repository.stamps() or {})
        self._seen = dict(self._loaded)

    async def look(self) -> dict[str, str]:
        """Load what has changed; return what was done: "loaded", "unloaded" or an error, by model."""
        found = await asyncio.to_thread(self._repository.stamps) or {}
        done: dict[str, str] = {}
        for name, stamp in found.items():
            if stamp == self._loaded.get(name) or stamp != self._seen.get(name):
                continue
            self._loaded[name] = stamp
            try:
                await self._repository.load(name)
                done[name] = "loaded"
            except MlsysError as error:
                done[name] = str(error)
        for name in self._loaded.keys() - found.keys():
            del self._loaded[name]
            try:
                await self._repository.unload(name)
                done[name] = "unloaded"
            except MlsysError as error:
                done[name] = str(error)
        self._seen = found
        return done


@asynccontextmanager
async def polled(repository: ModelRepository, every_s: float | None, logger: Any) -> AsyncIterator[None]:
    """Look for changes while the context is open; None: do not."""
    if every_s is None:
        yield
        return
    poller = Poller(repository)

    async def watch() -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                for name, what in (await poller.look()).items():
                    logger.info("model repository", model=name, result=what)
            except Exception:
                logger.error("model repository could not be looked at", exc_info=True)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
