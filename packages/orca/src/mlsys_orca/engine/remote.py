"""The engine in worker processes, as a front sees it: requests survive the death of the worker that serves them."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.serving import Finished, FinishReason
from mlsys_core.serving.processes import Boxes, Death, SupervisorLink
from mlsys_orca.engine import wire
from mlsys_orca.engine.client import EngineClient, EngineConfig, EngineCounts, EngineShape, Recoveries
from mlsys_orca.engine.recovery import Ledger, LiveRequest, Return, judge
from mlsys_orca.engine.stats import EngineStats
from mlsys_orca.engine.streams import PoisonedRequestError, Streams
from mlsys_orca.engine.worker_channel import WorkerChannel
from mlsys_orca.scheduling.batch import IterationOutput
from mlsys_orca.scheduling.request import GenerationRequest, GenerationResult

_log = logging.getLogger(__name__)
_LOOK_S = 0.1  # between two looks whether the worker hangs


class RemoteEngine(EngineClient):
    """Engine that runs in other processes.

    Not thread-safe but for :meth:`~mlsys_orca.engine.streams.Requests.cancel`: used from one event loop.

    Args:
        shape: The engine's.
        config: Its settings.
        link: To the supervisor, which brings the workers.
        boxes: The workers' black boxes.
    """

    def __init__(self, shape: EngineShape, config: EngineConfig, link: SupervisorLink, boxes: Boxes) -> None:
        streams, stats = Streams(), EngineStats()
        streams.is_live = shape.streams_tokens
        self._fleet = _Fleet(shape, link, boxes, streams, stats)
        super().__init__(shape, config, self._fleet, streams, stats)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine, or keeps it from serving now."""
        if self._fleet.failure is None and not self._fleet.is_ready:
            return ServingError("no worker runs at the moment; one is being started")
        return self._fleet.failure

    @property
    def recoveries(self) -> Recoveries:
        """Deaths of workers so far, and what they cost."""
        return self._fleet.recoveries

    def start(self) -> None:
        """Take workers as they come; in the event loop that will use the engine."""
        self._fleet.open(asyncio.get_running_loop())

    def close(self) -> None:
        """Stop: unfinished requests are cancelled. Idempotent; from any thread."""
        self._fleet.close()

    def counts(self) -> EngineCounts:
        """Return the engine's numbers as of its last iteration."""
        return self._fleet.counts


class _Fleet:
    """The workers, the requests, and who serves what: :class:`~mlsys_orca.engine.streams.Requests`."""

    def __init__(
        self, shape: EngineShape, link: SupervisorLink, boxes: Boxes, streams: Streams, stats: EngineStats
    ) -> None:
        self.failure: BaseException | None = None
        self.recoveries = Recoveries()
        self.worker: WorkerChannel | None = None  # that serves
        self.is_ready = False  # it has said so
        self.counts = EngineCounts(num_blocks=shape.num_blocks, num_free_blocks=shape.num_blocks, pool=None)
        self._goes_on = shape.goes_on
        self._link, self._boxes, self._streams, self._stats = link, boxes, streams, stats
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the event loop's
        self._standbys: list[WorkerChannel] = []
        self._ledger = Ledger()
        self._order = Return()
        self._profile = (0.0, 0)  # slowest iteration so far in seconds, most tokens
        self._deaths: dict[int, Death] = {}  # by worker, of those whose sockets have not told yet
        self._closed: dict[int, WorkerChannel] = {}  # the reverse
        self._hung: set[int] = set()  # workers that were killed since an iteration took too long
        self._died_s = 0.0  # when the serving worker died; 0: tokens have come since
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- requests, from the front

    @property
    def num_unfinished(self) -> int:
        return len(self._ledger.live)

    def submit(self, request: GenerationRequest, request_id: str) -> None:
        if self._is_closed or self.failure is not None:
            raise ServingError("the engine has stopped") from self.failure
        live = self._ledger.open(request)
        if self._order.is_open and self.worker is not None:
            self._hand_over(live)

    def cancel(self, request_id: str) -> None:
        if threading.get_ident() != self._thread:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.cancel, request_id)
            return
        handle = self._ledger.handles.get(request_id)
        if handle is None:
            return
        live = self._leave(handle)
        if live is not None:
            self._send(wire.Cancel(handle))
            self._streams.on_finished(Finished(request_id, FinishReason.CANCELLED), time.monotonic())

    # --- the supervisor

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        loop.add_reader(self._link.socket.fileno(), self._on_link)
        self._watcher = loop.create_task(self._watch())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        assert self._loop is not None
        if self._watcher is not None:
            self._watcher.cancel()
        self._loop.remove_reader(self._link.socket.fileno())
        self._end_all(FinishReason.CANCELLED, None)
        for worker in (*self._standbys, *([] if self.worker is None else [self.worker])):
            worker.close()
        self._standbys, self.worker, self.is_ready = [], None, False

    def _on_link(self) -> None:
        for message, fd in self._link.receive():
            match message:
                case {"event": "worker", "number": int(number), "pid": int(pid)} if fd is not None:
                    self._add_worker(number, pid, socket.socket(fileno=fd))
                case {"event": "died", "number": int(number)}:
                    death = Death(message["exit_code"], message["signal"], message["is_out_of_memory"])
                    self._on_death(number, death)
                case {"event": "gave up"}:
                    self.failure = ServingError("the engine died again and again, and is not started any more")
                    self._end_all(FinishReason.FAILED, self.failure)

    def _add_worker(self, number: int, pid: int, end: socket.socket) -> None:
        assert self._loop is not None
        worker = WorkerChannel(number, pid, end, self._loop, on_report=self._take, on_closed=self._on_closed)
        self._standbys.append(worker)
        self._promote()

    def _promote(self) -> None:
        """Have the next standby serve: whoever is alive goes on there."""
        is_judging = any(worker.num_sent for worker in self._closed.values())
        if self.worker is not None or is_judging or not self._standbys:
            return
        worker = self.worker = self._standbys.pop(0)
        worker.begin()
        if not self._order.is_open:  # the worker uses all of the memory for the suspects, before the others come
            for live in self._ledger.live.values():
                self._forget_blocks(live)
        tables = {live.handle: live.block_table for live in self._ledger.live.values() if live.block_table}
        slowest_s, most_tokens = self._profile
        worker.send(wire.Start(tables, slowest_s, most_tokens))
        self._hand_over_all()

    def _hand_over_all(self) -> None:
        alone = self._order.alone
        if alone is not None:
            self._hand_over(self._ledger.live[alone])
            return
        for live in self._ledger.by_arrival():
            self._hand_over(live)

    def _hand_over(self, live: LiveRequest) -> None:
        answer = tuple(token.token_id for token in live.tokens)
        if not self._goes_on:
            live.num_repeated, answer = len(answer), ()
        self._send(
            wire.submit_of(
                live.handle,
                live.request,
                answer=answer,
                block_table=live.block_table,
                computed=live.num_computed_tokens,
            )
        )

    def _forget_blocks(self, live: LiveRequest) -> None:
        self.recoveries.num_recomputed_tokens += live.num_computed_tokens
        live.block_table, live.num_computed_tokens = (), 0

    # --- deaths

    def _on_closed(self, worker: WorkerChannel) -> None:
        """Note that a worker's socket is closed: it is dead, and the supervisor will tell of what."""
        if worker in self._standbys:
            self._standbys.remove(worker)
        if worker is self.worker:
            self.worker, self.is_ready = None, False
            self._died_s = time.monotonic() if self._ledger.live else 0.0
        self._closed[worker.number] = worker
        self._bury(worker.number)

    def _on_death(self, number: int, death: Death) -> None:
        self._deaths[number] = death
        self._bury(number)

    def _bury(self, number: int) -> None:
        """Judge a death, when both the end of its socket and its cause are known; then have another worker serve."""
        if number not in self._deaths or number not in self._closed:
            return
        death, worker = self._deaths.pop(number), self._closed.pop(number)
        if self._is_closed:
            return
        if not worker.num_sent:  # a standby
            self._promote()
            return
        self.recoveries.num_deaths += 1
        owners = self._boxes.box(number).owners()
        running = [live for owner in owners if (live := self._ledger.live.get(owner)) is not None]
        verdict = judge(running, is_crash=death.is_crash or number in self._hung)
        self._hung.discard(number)
        _log.warning(
            "worker %d has died (%s) with %d requests, %d of them running; %d go on alone first",
            number,
            death,
            len(self._ledger.live),
            len(running),
            len(verdict.suspects),
        )
        for live in verdict.failed:
            self.recoveries.num_poisoned += 1
            self._fail(live.handle, PoisonedRequestError(live.num_deaths))
        self._finish_complete()
        self.recoveries.num_resumed += len(self._ledger.live)
        suspects = [live.handle for live in verdict.suspects if live.handle in self._ledger.live]
        waiting = [handle for handle in self._order.left if handle not in suspects and handle in self._ledger.live]
        self._order = Return([*suspects, *waiting])
        self._promote()

    def _finish_complete(self) -> None:
        """Finish those whose last token has come, and whose end was not told any more."""
        for live in list(self._ledger.live.values()):
            reason = live.finish_reason
            if reason is not None:
                guide = live.request.sampling.guide
                if guide is not None:  # what the dead worker knew of its parser
                    guide.allowed([token.token_id for token in live.tokens[:-1]])
                self._leave(live.handle)
                self._tell_done(live, live.result(reason))

    async def _watch(self) -> None:
        """Have the worker killed if it hangs; until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            worker = self.worker
            if worker is None or worker.is_condemned:
                continue
            box = self._boxes.box(worker.number)
            if worker.hangs(box, has_work=bool(self._ledger.live)):
                with suppress(OSError):  # no room for the message: the next look sends it
                    self._link.kill(worker.number)
                    worker.is_condemned = True
                    _log.warning("worker %d hangs: it is killed", worker.number)
                    if box.is_late() and not worker.is_stopped:
                        self._hung.add(worker.number)

    # --- what workers tell

    def _take(self, report: wire.Report) -> None:
        match report:
            case wire.Iteration():
                self._on_iteration(report)
            case wire.Lost():
                for handle in report.handles:
                    if (live := self._ledger.live.get(handle)) is not None:
                        live.block_table, live.num_computed_tokens = (), 0
            case wire.Ready():
                self.counts, self.is_ready = report.counts, True
            case wire.Placed():
                if (live := self._ledger.live.get(report.handle)) is not None:
                    self._stats.placed(live.request.request_id)
            case wire.Ended():
                self._on_ended(report)

    def _on_iteration(self, report: wire.Iteration) -> None:
        live_of = self._ledger.live
        if self._died_s:
            self.recoveries.longest_stall_s = max(self.recoveries.longest_stall_s, time.monotonic() - self._died_s)
            self._died_s = 0.0
        self.counts = report.counts
        self._profile = report.slowest_s, report.most_tokens
        for seal in report.seals:
            if (live := live_of.get(seal.handle)) is not None:
                live.num_computed_tokens = seal.num_computed_tokens
                if seal.block_table is not None:
                    live.block_table = seal.block_table
        sampled, scored = [], []
        for part in report.scored:
            if (live := live_of.get(part.handle)) is not None:
                prompt = wire.scored(live.request.request_id, part)
                if live.take_scored(prompt):
                    scored.append(prompt)
        for token in report.tokens:
            live = live_of.get(token.handle)
            if live is None:
                continue
            if live.num_repeated:
                live.num_repeated -= 1
            elif live.finish_reason is None:
                item = wire.sampled(live.request.request_id, token)
                live.tokens.append(item)
                sampled.append(item)
        self._streams.on_output(None, IterationOutput(tuple(sampled), tuple(scored)), 0.0)
        if not self._order.is_open:
            ran = {seal.handle for seal in report.seals} | {token.handle for token in report.tokens}
            had_its_turn = self._order.advanced(ran)
            if had_its_turn is not None:
                self._next_suspect(had_its_turn)

    def _next_suspect(self, handle: int) -> None:
        """Take a suspect off the worker, which has run it alone and lives; the next one's turn, or everybody's."""
        self._send(wire.Cancel(handle))
        if (live := self._ledger.live.get(handle)) is not None:
            self._ledger.rename(live)
            self._forget_blocks(live)
        self._hand_over_all()

    def _on_ended(self, report: wire.Ended) -> None:
        live = self._leave(report.handle)
        if live is None:
            return
        guide = live.request.sampling.guide
        if guide is not None and report.guide_failure is not None:
            guide.failure = report.guide_failure
        if report.finish_reason is not None:
            self._tell_done(live, live.result(report.finish_reason))
            return
        message = report.error or "the engine dropped this request"
        error = InvalidInputError(message) if report.is_input_error else ServingError(message)
        self._tell(live, FinishReason.FAILED, error)

    # --- ends

    def _leave(self, handle: int) -> LiveRequest | None:
        live = self._ledger.drop(handle)
        if not self._order.is_open:
            was_alone = self._order.alone == handle
            self._order.ended(handle)
            if was_alone and self.worker is not None:
                self._hand_over_all()
        return live

    def _fail(self, handle: int, error: BaseException) -> None:
        live = self._leave(handle)
        if live is not None:
            self._tell(live, FinishReason.FAILED, error)

    def _end_all(self, reason: FinishReason, error: BaseException | None) -> None:
        for live in list(self._ledger.live.values()):
            self._ledger.drop(live.handle)
            self._tell(live, reason, error)

    def _tell_done(self, live: LiveRequest, result: GenerationResult) -> None:
        finished: Finished[Any] = Finished(live.request.request_id, FinishReason.DONE, result)
        self._streams.on_finished(finished, time.monotonic())

    def _tell(self, live: LiveRequest, reason: FinishReason, error: BaseException | None) -> None:
        self._streams.on_finished(Finished(live.request.request_id, reason, error=error), time.monotonic())

    def _send(self, command: wire.Command) -> None:
        if self.worker is not None:
            self.worker.send(command)
