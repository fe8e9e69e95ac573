"""The engine in worker processes, as a front sees it: requests survive the death of the worker that serves them."""

from __future__ import annotations

import asyncio

from mlsys_core.errors import ServingError
from mlsys_orca.engine import wire
from mlsys_orca.engine.client import EngineClient, EngineConfig, EngineCounts, EngineShape, Recoveries
from mlsys_orca.engine.fleet.fleet import Fleet
from mlsys_orca.engine.stats import EngineStats
from mlsys_orca.engine.streams import Streams
from mlsys_orca.model.adapters import AdapterFiles
from mlsys_serving.processes import Boxes, SupervisorLink

_LOOK_S = 0.002  # between two looks if a worker serves


class RemoteEngine(EngineClient):
    """Engine that runs in other processes, in one replica or several.

    Not thread-safe but for :meth:`~mlsys_orca.engine.streams.Requests.cancel`: used from one event loop.

    Args:
        shape: Each replica's.
        config: Its settings.
        link: To the supervisor, which brings the workers.
        boxes: The workers' black boxes.
    """

    def __init__(self, shape: EngineShape, config: EngineConfig, link: SupervisorLink, boxes: Boxes) -> None:
        streams, stats = Streams(), EngineStats()
        streams.is_live = shape.streams_tokens
        self._fleet = Fleet(shape, config, link, boxes, streams, stats)
        super().__init__(shape, config, self._fleet, streams, stats)
        self.score_source = self._fleet.score

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine, or keeps it from serving now: it serves while one replica does."""
        if self._fleet.failure is None and not self._fleet.is_ready:
            if self._fleet.waits_for is not None:
                return ServingError(f"parts of the model are not there: {self._fleet.waits_for}")
            return ServingError("no worker runs at the moment; one is being started")
        return self._fleet.failure

    @property
    def recoveries(self) -> Recoveries:
        """Deaths of workers so far, and what they cost."""
        return self._fleet.recoveries

    def start(self) -> None:
        """Take workers as they come; in the event loop that will use the engine."""
        self._fleet.open(asyncio.get_running_loop())

    async def ready(self) -> None:
        """Return when a replica serves."""
        while not self._fleet.is_ready:
            if self._fleet.failure is not None:
                raise ServingError("no worker could be started") from self._fleet.failure
            await asyncio.sleep(_LOOK_S)

    async def _install(self, key: str, files: AdapterFiles) -> None:
        await self._fleet.load_adapter(wire.LoadAdapter(key, files.source, files.config, files.weights))

    async def _drop(self, key: str) -> None:
        self._fleet.unload_adapter(key)

    def close(self) -> None:
        """Stop: unfinished requests are cancelled. Idempotent; from any thread."""
        self._fleet.close()

    def counts(self) -> EngineCounts:
        """Return the sums of the replicas' numbers, as of their last iterations."""
        return self._fleet.counts
