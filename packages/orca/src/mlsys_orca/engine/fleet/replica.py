"""One replica of an engine: its requests, what is sealed of them, and the worker that serves them now.

A worker's death concerns the requests of its replica alone: they go on at the next worker, over the same K/V memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import FinishReason
from mlsys_orca.engine import wire
from mlsys_orca.engine.fleet.listeners import Listeners
from mlsys_orca.engine.fleet.routing import KeptBlocks, Load
from mlsys_orca.engine.recovery import Ledger, LiveRequest
from mlsys_orca.engine.settings import EngineCounts, EngineShape, PoolCounts
from mlsys_orca.engine.streams import PoisonedRequestError
from mlsys_orca.engine.worker_channel import WorkerChannel
from mlsys_orca.scheduling.batch import IterationOutput, SampledToken, ScoredPrompt
from mlsys_serving.processes import Death
from mlsys_serving.processes.recovery import Turns, judge

NOTHING = EngineCounts(num_blocks=0, num_free_blocks=0, pool=None)


def summed(parts: Sequence[EngineCounts]) -> EngineCounts:
    """Return the sums of all numbers; a part without a pool adds none to the pools'.

    Example:
        >>> part = EngineCounts(num_blocks=4, num_free_blocks=1, pool=None)
        >>> summed([part, part])
        EngineCounts(num_blocks=8, num_free_blocks=2, pool=None)
    """
    pools = [part.pool for part in parts if part.pool is not None]
    names = [field.name for field in fields(PoolCounts)]
    return EngineCounts(
        num_blocks=sum(part.num_blocks for part in parts),
        num_free_blocks=sum(part.num_free_blocks for part in parts),
        pool=PoolCounts(**{name: sum(getattr(pool, name) for pool in pools) for name in names}) if pools else None,
    )


def history(counts: EngineCounts) -> EngineCounts:
    """Return what stays true of an engine that has ended: its totals since its start."""
    pool = counts.pool
    return replace(NOTHING, pool=None if pool is None else replace(pool, num_running=0, num_unfinished=0))


_log = logging.getLogger(__name__)


class Replica:
    """Requests of one replica, and their worker. Used from one event loop.

    Args:
        number: Its place among the replicas: that of its K/V memory.
        shape: The engine's.
        handles: Numbers for its requests, shared with the other replicas.
        listeners: Who hears of its requests.
    """

    def __init__(self, number: int, shape: EngineShape, handles: Iterator[int], listeners: Listeners) -> None:
        self.number = number
        self.ledger = Ledger(handles)
        self.worker: WorkerChannel | None = None  # that serves
        self.lost: WorkerChannel | None = None  # that served, is dead, and was not judged yet
        self.is_ready = False  # the worker has said so
        self.waits_since_s = 0.0  # since when there is no worker, or it waits for parts of the model
        self.waits_for: str | None = None  # parts that the worker waits for; empty: for its ranks
        self._kv_identity = ""  # of the keys and values that block tables are of
        self._goes_on, self._restores_blocks = shape.goes_on, shape.restores_blocks
        self._listeners, self._recoveries = listeners, listeners.recoveries
        self._kept = KeptBlocks()
        self._order = Turns()
        self._profile = (0.0, 0.0)  # slowest iteration so far in seconds, most work
        self._now = EngineCounts(num_blocks=shape.num_blocks, num_free_blocks=shape.num_blocks, pool=None)
        self._before = NOTHING  # totals of the workers before

    @property
    def counts(self) -> EngineCounts:
        """Numbers as of the last iteration; totals are of all its workers."""
        return summed([self._now, self._before])

    def load(self, chain: Sequence[bytes]) -> Load:
        """Return its state for the choice among replicas, for a prompt whose blocks have the digests ``chain``."""
        return Load(
            is_serving=self.is_ready and self._order.is_open,
            num_requests=len(self.ledger.live),
            num_outstanding_tokens=sum(live.num_outstanding_tokens for live in self.ledger.live.values()),
            num_shared_blocks=self._kept.num_leading(chain),
            num_kept_blocks=len(self._kept),
        )

    # --- requests

    def submit(self, live: LiveRequest) -> None:
        """Serve a request that stands in the ledger, now or when there is a worker."""
        if self._order.is_open or self._restores_blocks:
            self._hand_over(live)

    def cancel(self, handle: int) -> None:
        """Have a request leave."""
        live = self._leave(handle)
        if live is not None:
            self._send(wire.Cancel(handle))
            self._listeners.on_left(live, FinishReason.CANCELLED, None)

    def move_out(self) -> list[LiveRequest]:
        """Give up the requests that other replicas may serve, without their blocks; suspects stay."""
        suspects = set(self._order.left)
        moving = [live for live in self.ledger.by_arrival() if live.handle not in suspects]
        for live in moving:
            self.ledger.drop(live.handle)
            self._send(wire.Cancel(live.handle))
            self._forget_blocks(live)
        return moving

    def end_all(self, reason: FinishReason, error: BaseException | None) -> None:
        """Have all requests leave."""
        for live in list(self.ledger.live.values()):
            self.ledger.drop(live.handle)
            self._listeners.on_left(live, reason, error)

    # --- workers

    def serve(self, worker: WorkerChannel) -> None:
        """Have a standby serve: whoever is alive goes on there."""
        self.worker = worker
        worker.on_report = self._take
        worker.begin()
        tables = {live.handle: live.block_table for live in self.ledger.live.values() if live.block_table}
        slowest_s, most_work = self._profile
        worker.send(
            wire.Start(
                self.number,
                tables,
                self._order.alone,
                dict(self._kept.digests),
                slowest_s,
                most_work,
                self._kv_identity,
            )
        )
        self._hand_over_all()

    def lose(self) -> None:
        """Note that the worker's socket is closed: it is dead, and the supervisor will tell of what."""
        self.lost, self.worker, self.is_ready = self.worker, None, False
        self.waits_since_s, self.waits_for = time.monotonic(), None

    def bury(self, death: Death, owners: Collection[int], *, is_hung: bool) -> None:
        """Judge the death of the worker that was lost.

        Args:
            death: Its cause.
            owners: Handles of the requests in its last iteration.
            is_hung: It was killed since it hung.
        """
        assert self.lost is not None
        worker, self.lost = self.lost, None
        self._before, self._now = summed([self._before, history(self._now)]), self._at_rest()
        self._recoveries.num_deaths += 1
        running = [live for owner in owners if (live := self.ledger.live.get(owner)) is not None]
        verdict = judge(running, is_crash=death.is_crash or is_hung)
        _log.warning(
            "worker %d of replica %d has died (%s) with %d requests, %d of them running; %d go on alone first",
            worker.number,
            self.number,
            death,
            len(self.ledger.live),
            len(running),
            len(verdict.suspects),
        )
        for live in running:
            self._listeners.stats.traces.note(live.request.request_id, "worker died", **{"mlsys.death": str(death)})
            self._listeners.score.interrupted(live.request.request_id)
        for live in verdict.failed:
            self._recoveries.num_poisoned += 1
            if self._leave(live.handle) is not None:
                self._listeners.on_left(live, FinishReason.FAILED, PoisonedRequestError(live.num_deaths))
        self._finish_complete()
        for live in self.ledger.live.values():
            if live.has_begun or live in running:
                live.stalled_s = live.stalled_s or self.waits_since_s
        self._recoveries.num_resumed += len(self.ledger.live)
        self._order.put_first([live.handle for live in verdict.suspects if live.handle in self.ledger.live])

    def close(self) -> None:
        """Close the socket to the worker, which ends it."""
        if self.worker is not None:
            self.worker.close()
        self.worker, self.is_ready = None, False

    def _at_rest(self) -> EngineCounts:
        return EngineCounts(num_blocks=self._now.num_blocks, num_free_blocks=self._now.num_blocks, pool=None)

    def _hand_over_all(self) -> None:
        alone = self._order.alone
        for live in self.ledger.by_arrival():
            if alone is None or live.handle == alone or self._restores_blocks:
                self._hand_over(live)

    def _next_turn(self) -> None:
        """Let a suspect run alone for an iteration, or all requests if there is none."""
        if self._restores_blocks:
            self._send(wire.Alone(self._order.alone))
        else:
            self._hand_over_all()

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
        """Note that a request's keys and values are lost to a death."""
        self._recoveries.num_recomputed_tokens += live.num_computed_tokens
        live.block_table, live.num_computed_tokens = (), 0

    def _send(self, command: wire.Command) -> None:
        if self.worker is not None:
            self.worker.send(command)

    # --- what the worker tells

    def _take(self, report: wire.Report) -> None:
        match report:
            case wire.Iteration():
                self._on_iteration(report)
            case wire.Lost():
                for handle in report.handles:
                    if (live := self.ledger.live.get(handle)) is not None:
                        self._listeners.score.preempted(live.request.request_id)
                        if self._order.is_open:
                            live.block_table, live.num_computed_tokens = (), 0
                        else:  # it was held, and a suspect needed them
                            self._forget_blocks(live)
            case wire.Kept():
                self._kept.update(report.changes)
            case wire.Waiting():
                self.waits_for = report.reason
            case wire.Ready():
                self._on_ready(report)
            case wire.Placed():
                if (live := self.ledger.live.get(report.handle)) is not None:
                    self._listeners.stats.placed(live.request.request_id)
            case wire.Ended():
                self._on_ended(report)

    def _on_ready(self, report: wire.Ready) -> None:
        self._now, self.is_ready, self.waits_for = report.counts, True, None
        if self._kv_identity not in ("", report.kv_identity):  # keys and values were lost with the host they were on
            self._kept = KeptBlocks()
            for live in self.ledger.live.values():
                self._forget_blocks(live)
        self._kv_identity = report.kv_identity

    def _on_iteration(self, report: wire.Iteration) -> None:
        self._now = report.counts
        self._profile = report.slowest_s, report.most_work
        self._listeners.on_iteration(self.number, self.ledger.live, report)
        self._listeners.on_output(seal(self.ledger.live, report))
        for token in report.tokens:
            if (live := self.ledger.live.get(token.handle)) is not None:
                self._listeners.on_advanced(live)
        alone = None if self._order.alone is None else self.ledger.live.get(self._order.alone)
        if alone is not None and alone.has_advanced:
            self._end_turn(alone)
        elif alone is not None and self._restores_blocks:
            self._next_turn()

    def _end_turn(self, live: LiveRequest) -> None:
        """Have a suspect join the others: the worker has run it alone, and lives."""
        self._order.drop(live.handle)
        if not self._restores_blocks:  # nor can it be held: it begins anew when all may run
            self._send(wire.Cancel(live.handle))
            self.ledger.rename(live)
            self._forget_blocks(live)
        self._next_turn()

    def _on_ended(self, report: wire.Ended) -> None:
        live = self._leave(report.handle)
        if live is None:
            return
        guide = live.request.sampling.guide
        if guide is not None and report.guide_failure is not None:
            guide.failure = report.guide_failure
        if report.finish_reason is not None:
            self._listeners.on_done(live, report.finish_reason)
            return
        message = report.error or "the engine dropped this request"
        error = InvalidInputError(message) if report.is_input_error else ServingError(message)
        self._listeners.on_left(live, FinishReason.FAILED, error)

    # --- ends

    def _finish_complete(self) -> None:
        """Finish those whose last token has come, and whose end was not told any more."""
        for live in list(self.ledger.live.values()):
            reason = live.finish_reason
            if reason is not None:
                guide = live.request.sampling.guide
                if guide is not None:  # what the dead worker knew of its parser
                    guide.allowed([token.token_id for token in live.tokens[:-1]])
                self._leave(live.handle)
                self._listeners.on_done(live, reason)

    def _leave(self, handle: int) -> LiveRequest | None:
        live = self.ledger.drop(handle)
        was_alone = self._order.alone == handle
        self._order.drop(handle)
        if was_alone and self.worker is not None:
            self._next_turn()
        return live


def seal(live_of: Mapping[int, LiveRequest], report: wire.Iteration) -> IterationOutput:
    """Take what an iteration gave into its requests; return what of it is new to their readers.

    Args:
        live_of: Requests by handle; what is said of others is for nobody.
        report: The iteration.
    """
    for state in report.seals:
        if (live := live_of.get(state.handle)) is not None:
            live.num_computed_tokens = state.num_computed_tokens
            if state.block_table is not None:
                live.block_table = state.block_table
    return IterationOutput(tuple(_sampled(live_of, report)), tuple(_scored(live_of, report)))


def _sampled(live_of: Mapping[int, LiveRequest], report: wire.Iteration) -> Iterator[SampledToken]:
    for token in report.tokens:
        live = live_of.get(token.handle)
        if live is None:
            continue
        if live.num_repeated:
            live.num_repeated -= 1
        elif live.finish_reason is None:
            item = wire.sampled(live.request.request_id, token)
            live.tokens.append(item)
            yield item


def _scored(live_of: Mapping[int, LiveRequest], report: wire.Iteration) -> Iterator[ScoredPrompt]:
    for part in report.scored:
        live = live_of.get(part.handle)
        if live is not None:
            new = live.take_scored(wire.scored(live.request.request_id, part))
            if new is not None:
                yield new
