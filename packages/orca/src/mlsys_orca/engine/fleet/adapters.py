"""Adapters that were loaded while the server runs: every worker has them, those to come too."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from mlsys_core.errors import InvalidInputError
from mlsys_orca.engine import wire
from mlsys_orca.engine.worker_channel import WorkerChannel


@dataclass(slots=True)
class _Loading:
    """An adapter on its way to the workers."""

    waiting: set[int]  # numbers of workers that have not answered
    error: str | None = None
    is_done: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, number: int, error: str | None) -> None:
        self.waiting.discard(number)
        self.error = self.error or error
        if not self.waiting or self.error is not None:
            self.is_done.set()


class WorkerAdapters:
    """Contents of all adapters that workers must be told of. Used from one event loop."""

    def __init__(self) -> None:
        self._commands: dict[str, wire.LoadAdapter] = {}
        self._loading: dict[str, _Loading] = {}

    def greet(self, worker: WorkerChannel) -> None:
        """Tell a new worker of all of them, before anything else."""
        for command in self._commands.values():
            worker.send(command)

    async def load(self, command: wire.LoadAdapter, workers: Iterable[WorkerChannel]) -> None:
        """Have all workers know an adapter; return when they do.

        A worker that dies meanwhile is not waited for: who follows it is told before it has requests.

        Raises:
            InvalidInputError: one cannot; none has it then.
        """
        told = list(workers)
        loading = self._loading[command.key] = _Loading({worker.number for worker in told})
        self._commands[command.key] = command
        for worker in told:
            worker.send(command)
        try:
            if told:
                await loading.is_done.wait()
        finally:
            del self._loading[command.key]
        if loading.error is not None:
            self.unload(command.key, told)
            raise InvalidInputError(loading.error)

    def unload(self, key: str, workers: Iterable[WorkerChannel]) -> None:
        """Have all workers forget an adapter."""
        self._commands.pop(key, None)
        for worker in workers:
            worker.send(wire.UnloadAdapter(key))

    def on_loaded(self, worker: WorkerChannel, report: wire.AdapterLoaded) -> bool:
        """Note a worker's answer; return False if the worker cannot have what all others have."""
        loading = self._loading.get(report.key)
        if loading is not None:
            loading.answered(worker.number, report.error)
            return True
        return report.error is None or report.key not in self._commands

    def on_closed(self, worker: WorkerChannel) -> None:
        """Wait no more for a worker that is dead."""
        for loading in self._loading.values():
            loading.answered(worker.number, None)
