"""A worker process: the engine behind a socket. It ends with its front, and keeps nothing that would be lost."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError, MlsysError, ServingError
from mlsys_core.loop import Finished
from mlsys_orca.backends.native.iteration import NativeKVCache
from mlsys_orca.engine import wire
from mlsys_orca.engine.core import EngineCore
from mlsys_orca.engine.crash_points import CrashPoints
from mlsys_orca.engine.settings import EngineConfig
from mlsys_orca.engine.work_watch import IterationDeadline, WorkWatch, die_with
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.kv_cache import KVCache
from mlsys_orca.scheduling.batch import GenerationResult, IterationBatch, IterationOutput, SamplingParams
from mlsys_orca.scheduling.request_pool import NOBODY
from mlsys_orca.text.guides import Grammar, GrammarGuide, GuideMaker
from mlsys_serving.processes import FrameReader, frame
from mlsys_serving.processes.box import Box
from mlsys_serving.processes.children import EXIT_UNHANDLED

if TYPE_CHECKING:  # a model that is not divided starts without them
    from mlsys_orca.parallel.ranks import RankExecutor, RankHolders
    from mlsys_orca.parallel.wiring import GroupShape

_log = logging.getLogger(__name__)
_RECEIVE_NBYTES = 1 << 16
_TELL_S = 0.2  # between two words to the front, while ranks are to come


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All that a worker needs; made before the fork."""

    loaded: LoadedModel
    config: EngineConfig
    guides: GuideMaker
    kv_caches: Sequence[KVCache | NativeKVCache]  # in shared memory, one for each replica; none: ranks have them
    crash_points: CrashPoints
    holders: RankHolders | None = None  # who forks the ranks that run the model; None: the worker runs it
    group: GroupShape | None = None  # of the ranks


def receive(end: socket.socket) -> bytes:
    """Return the next bytes from the front; none where it has gone, whether or not it had read what was sent to it."""
    try:
        return end.recv(_RECEIVE_NBYTES)
    except ConnectionResetError:
        return b""


class Worker:
    """Engine whose requests come, and whose tokens leave, as frames.

    Args:
        settings: The model and its limits.
        end: The socket to the front.
        box: Where the process notes what it is at.
    """

    def __init__(self, settings: WorkerSettings, end: socket.socket, box: Box) -> None:
        self._settings, self._end, self._box = settings, end, box
        self._reach = settings.crash_points.reach
        self._watch = WorkWatch(box, settings.crash_points, self._before_iteration)
        self._writing = threading.Lock()
        self._guides: dict[str, GrammarGuide] = {}  # by request
        self._told: dict[str, tuple[int, ...]] = {}  # block tables that the front knows, by request
        self._lost: frozenset[int] = frozenset()  # requests whose keys and values were lost before this worker began
        self._ranks: RankExecutor | None = None  # None: the model runs here
        if settings.holders is not None and settings.group is not None:
            group = settings.holders.group(settings.group)
            die_with(group)
            self._ranks = group.executor(watch=self._watch)
        ranks: Any = self._ranks
        self._core = EngineCore(
            settings.loaded,
            settings.config,
            available_nbytes=0,
            listener=self,
            kv_cache=settings.kv_caches[0] if self._ranks is None else None,
            wrap=self._watch.around,
            new_executor=None if self._ranks is None else lambda _: ranks,
        )
        if self._core.pool is not None:
            self._core.pool.on_preempted = self._on_preempted
            self._core.pool.on_placed = lambda request_id: self._send(wire.Placed(int(request_id)))

    def run(self) -> None:
        """Follow the front's messages until it closes the socket."""
        frames = FrameReader()
        while data := receive(self._end):
            for payload in frames.feed(data):
                self._reach("received")
                self._box.receive()  # before it is followed: a large grammar takes a while
                self._follow(wire.decode_command(payload))
        os._exit(0)  # the front is gone: an iteration under way is for nobody

    def _follow(self, command: wire.Command) -> None:
        match command:
            case wire.Submit():
                self._submit(command)
            case wire.Cancel():
                self._core.loop.cancel(str(command.handle))
            case wire.Alone():
                self._core.loop.call(partial(self._hold_all_but, command.handle))
            case wire.Start():
                self._start(command)

    def _start(self, command: wire.Start) -> None:
        self._reach("started")
        identity = ""
        if self._ranks is not None:
            identity = self._have_ranks_serve(self._ranks, command.replica)
        elif self._core.runner is not None:
            self._core.runner.kv_cache = self._settings.kv_caches[command.replica]
        self._watch.deadline = IterationDeadline(command.slowest_s, most_work=command.most_work)
        self._hold_all_but(command.alone)
        if command.kv_identity and command.kv_identity != identity:
            self._lost = frozenset(command.block_tables)
        elif self._core.shape.restores_blocks:
            tables = {str(handle): table for handle, table in command.block_tables.items()}
            self._core.block_tables.restore(tables, command.kept_blocks)
            self._told.update(tables)
        elif command.kept_blocks:
            self._send(wire.Kept(dict.fromkeys(command.kept_blocks)))
        self._core.block_tables.note_cache_changes()
        self._core.start()
        self._send(wire.Ready(self._core.counts(), identity))

    def _have_ranks_serve(self, ranks: RankExecutor, replica: int) -> str:
        """Wait for the ranks, and tell the front meanwhile; return the identity of their keys and values."""
        found: list[str] = []

        def serve() -> None:
            try:
                found.append(ranks.serve(replica))
            except ServingError as error:
                self._watch.fail(error)
            except BaseException:  # noqa: BLE001 - the thread's end, and the worker's
                _log.exception("the ranks cannot serve: this worker ends")
                os._exit(EXIT_UNHANDLED)

        thread = threading.Thread(target=serve, name="orca-ranks-come", daemon=True)
        thread.start()
        thread.join(_TELL_S)
        while thread.is_alive():
            self._send(wire.Waiting(ranks.waits_for))
            thread.join(_TELL_S)
        return found[0]

    def _hold_all_but(self, handle: int | None) -> None:
        if self._core.pool is not None:
            self._core.pool.alone = None if handle is None else str(handle)

    def _submit(self, command: wire.Submit) -> None:
        request_id = str(command.handle)
        try:
            sampling = wire.sampling_of(command)
            guide = None
            if command.grammar is not None:
                guide = self._settings.guides.guide(Grammar(command.grammar))
                self._guides[request_id] = guide
            request = wire.request_of(
                command,
                SamplingParams(**sampling, guide=guide),
                keeps_blocks=self._core.shape.restores_blocks and command.handle not in self._lost,
            )
            self._core.loop.submit(request, request_id)
        except InvalidInputError as error:
            self._guides.pop(request_id, None)
            self._send(wire.Ended(command.handle, None, None, str(error), is_input_error=True))

    def on_output(self, batch: IterationBatch, output: IterationOutput, now: float) -> None:
        """Tell the front what an iteration gave. Called in the engine's thread, before the next one runs."""
        seals = []
        sequences = {} if self._core.pool is None else self._core.pool.sequences
        for part in batch.requests:
            sequence = sequences.get(part.request_id)
            if sequence is not None:
                table = sequence.block_table
                is_told = self._told.get(part.request_id) is table
                self._told[part.request_id] = table
                computed = sequence.num_computed_tokens
                seals.append(
                    wire.Seal(int(part.request_id), computed, None if is_told else table, part.stop - part.start)
                )
        tokens = tuple(
            wire.Token(
                int(token.request_id), token.token_id, token.logprob, token.top_logprobs, token.num_cached_tokens
            )
            for token in output.sampled
        )
        scored = tuple(
            wire.Scored(
                int(part.request_id),
                part.position,
                tuple((token.token_id, token.logprob, token.top_logprobs) for token in part.tokens),
            )
            for part in output.scored
        )
        self._tell_kept()
        self._send(
            wire.Iteration(
                tokens,
                scored,
                tuple(seals),
                self._core.counts(),
                self._watch.deadline.slowest_s,
                self._watch.deadline.most_work,
                *self._watch.ran_s,
            )
        )
        self._watch.told(batch)  # only now: a worker that dies before has not told whose iteration it was
        self._reach("sent")

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Tell the front that a request has left."""
        if finished.error is not None and not isinstance(finished.error, MlsysError):
            _log.error("the serving loop failed: this worker ends", exc_info=finished.error)
            os._exit(EXIT_UNHANDLED)
        self._told.pop(finished.request_id, None)
        guide = self._guides.pop(finished.request_id, None)
        result, error = finished.result, finished.error
        self._send(
            wire.Ended(
                int(finished.request_id),
                result.finish_reason if isinstance(result, GenerationResult) else None,
                None if guide is None else guide.failure,
                None if error is None else str(error),
                isinstance(error, InvalidInputError),
            )
        )

    def _on_preempted(self, request_id: str) -> None:
        self._told.pop(request_id, None)
        self._send(wire.Lost((int(request_id),)))

    def _tell_kept(self) -> None:
        changes = self._core.block_tables.take_cache_changes()
        if changes:
            self._send(wire.Kept(changes))

    def _before_iteration(self) -> None:
        self._tell_kept()  # the front must know which contents end before they do
        if self._core.pool is not None and self._core.pool.alone is not None:
            self._core.pool.alone = NOBODY  # until the front knows that this iteration has ended no worker

    def _send(self, report: wire.Report) -> None:
        data = frame(wire.encode(report))
        with self._writing:
            try:
                if self._settings.crash_points.step == "half sent" and isinstance(report, wire.Iteration):
                    self._end.sendall(data[: len(data) // 2])
                    self._reach("half sent")
                    data = data[len(data) // 2 :]
                self._end.sendall(data)
            except OSError:  # the front is gone
                os._exit(0)
