"""The replicas of an engine, the standbys, and the requests' way to them."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from contextlib import suppress
from itertools import count

from mlsys_core.errors import ServingError
from mlsys_core.loop import FinishReason
from mlsys_orca.engine.client import EngineClient
from mlsys_orca.engine.fleet.listeners import Listeners
from mlsys_orca.engine.fleet.replica import Replica, summed
from mlsys_orca.engine.fleet.routing import chain_of, choose
from mlsys_orca.engine.settings import EngineConfig, EngineCounts, EngineShape, Recoveries
from mlsys_orca.engine.streams import EngineStats, Streams
from mlsys_orca.engine.watching.remote import RemoteScore
from mlsys_orca.engine.worker_channel import WorkerChannel
from mlsys_orca.scheduling.batch import GenerationRequest
from mlsys_serving.processes import Boxes, Death, SupervisorLink
from mlsys_serving.processes.workers import Workers

_log = logging.getLogger(__name__)
_LOOK_S = 0.1  # between two looks whether a worker hangs
_PATIENCE_S = 1.0  # that requests wait for a standby, before they begin again at another replica


class Fleet:
    """Replicas behind one front: :class:`~mlsys_orca.engine.streams.Requests`.

    Args:
        shape: Each replica's.
        config: Their settings, and how many there are.
        link: To the supervisor, which brings the workers.
        boxes: The workers' black boxes.
        streams: Where tokens go.
        stats: Times and counts.
    """

    def __init__(
        self,
        shape: EngineShape,
        config: EngineConfig,
        link: SupervisorLink,
        boxes: Boxes,
        streams: Streams,
        stats: EngineStats,
    ) -> None:
        self.failure: BaseException | None = None
        self.recoveries = Recoveries()
        self.score = RemoteScore(
            stats.traces, lambda: [live for each in self.replicas for live in each.ledger.by_arrival()]
        )
        handles, listeners = count(), Listeners(streams, stats, self.recoveries, self.score)
        self.replicas = [Replica(number, shape, handles, listeners) for number in range(config.num_replicas)]
        self._max_batch_size, self._block_size = config.max_batch_size, shape.block_size
        self._link, self._boxes = link, boxes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the event loop's
        self._workers = Workers(
            link,
            connect=self._connect,
            promote=self._promote,
            on_death=self._on_death,
            on_gave_up=self._on_gave_up,
        )
        self._hung: set[int] = set()  # workers that were killed since an iteration took too long
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """True if a replica serves."""
        return any(replica.is_ready for replica in self.replicas)

    @property
    def waits_for(self) -> str | None:
        """Parts of the model that keep replicas from serving; None: none do."""
        return next((replica.waits_for for replica in self.replicas if replica.waits_for), None)

    @property
    def counts(self) -> EngineCounts:
        """Sums of the replicas' numbers, as of their last iterations."""
        return summed([replica.counts for replica in self.replicas])

    # --- requests, from the front

    @property
    def num_unfinished(self) -> int:
        """Number of requests accepted that have not left."""
        return sum(len(replica.ledger.live) for replica in self.replicas)

    def submit(self, request: GenerationRequest, request_id: str) -> None:
        """Accept ``request`` and give it to a replica."""
        if self._is_closed or self.failure is not None:
            raise ServingError("the engine has stopped") from self.failure
        replica = self._replica_for(request)
        replica.submit(replica.ledger.open(request))

    def cancel(self, request_id: str) -> None:
        """Have a request leave; unknown ids are ignored. From any thread."""
        if threading.get_ident() != self._thread:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.cancel, request_id)
            return
        for replica in self.replicas:
            handle = replica.ledger.handles.get(request_id)
            if handle is not None:
                replica.cancel(handle)

    def _replica_for(self, request: GenerationRequest) -> Replica:
        if len(self.replicas) == 1:
            return self.replicas[0]
        chain = chain_of(request, self._block_size)
        loads = [replica.load(chain) for replica in self.replicas]
        return self.replicas[choose(loads, max_batch_size=self._max_batch_size)]

    # --- life

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take workers as they come; in the event loop that will use the fleet."""
        self._loop, self._thread = loop, threading.get_ident()
        self._workers.open(loop)
        self._watcher = loop.create_task(self._watch())

    def close(self) -> None:
        """Stop: unfinished requests are cancelled. Idempotent; from any thread."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._end_all(FinishReason.CANCELLED, None)
        for replica in self.replicas:
            replica.close()
        self._workers.close()

    def _end_all(self, reason: FinishReason, error: BaseException | None) -> None:
        for replica in self.replicas:
            replica.end_all(reason, error)

    # --- workers come and go

    def _on_gave_up(self) -> None:
        self.failure = ServingError("the engine died again and again, and is not started any more")
        self._end_all(FinishReason.FAILED, self.failure)

    def _connect(self, number: int, pid: int, end: socket.socket) -> WorkerChannel:
        assert self._loop is not None
        return WorkerChannel(number, pid, end, self._loop, on_closed=self._on_closed)

    def _promote(self) -> None:
        """Have standbys serve where a worker is missing; who has waited longest comes first."""
        missing = [replica for replica in self.replicas if replica.worker is None and replica.lost is None]
        for replica in sorted(missing, key=lambda replica: replica.waits_since_s):
            if self._workers.standbys:
                replica.serve(self._workers.standbys.pop(0))

    def _on_closed(self, worker: WorkerChannel) -> None:
        """Note that a worker's socket is closed: it is dead, and the supervisor will tell of what."""
        self._workers.leave_out(worker)
        for replica in self.replicas:
            if replica.worker is worker:
                replica.lose()

    def _on_death(self, worker: WorkerChannel, death: Death) -> None:
        """Judge a death: of the requests of its replica alone."""
        self._on_closed(worker)
        for replica in self.replicas:
            if replica.lost is worker and not self._is_closed:
                replica.bury(death, self._boxes.box(worker.number).owners(), is_hung=worker.number in self._hung)
        self._hung.discard(worker.number)

    async def _watch(self) -> None:
        """Have workers killed that hang, and requests moved that wait too long for one; until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for replica in self.replicas:
                if replica.worker is not None:
                    self._look(replica, replica.worker)
                is_waiting = bool(replica.waits_for) if replica.worker is not None else replica.lost is None
                if is_waiting and time.monotonic() - replica.waits_since_s > _PATIENCE_S:
                    self._move(replica)

    def _look(self, replica: Replica, worker: WorkerChannel) -> None:
        box = self._boxes.box(worker.number)
        if worker.is_condemned or not worker.hangs(box, has_work=bool(replica.ledger.live)):
            return
        with suppress(OSError):  # no room for the message: the next look sends it
            self._link.kill(worker.number)
            worker.is_condemned = True
            _log.warning("worker %d hangs: it is killed", worker.number)
            if box.is_late() and not worker.is_stopped:
                self._hung.add(worker.number)

    def _move(self, replica: Replica) -> None:
        """Have requests begin again at other replicas, since their own has had no worker for a while."""
        if not self.is_ready:
            return
        for live in replica.move_out():
            other = self._replica_for(live.request)
            other.ledger.adopt(live)
            other.submit(live)


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

    def close(self) -> None:
        """Stop: unfinished requests are cancelled. Idempotent; from any thread."""
        self._fleet.close()

    def counts(self) -> EngineCounts:
        """Return the sums of the replicas' numbers, as of their last iterations."""
        return self._fleet.counts
