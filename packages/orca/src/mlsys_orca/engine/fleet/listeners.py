"""Ears of the front: what replicas tell of their requests, for streams, metrics and the tally of deaths."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlsys_core.loop import Finished, FinishReason
from mlsys_orca.engine import wire
from mlsys_orca.engine.recovery import LiveRequest
from mlsys_orca.engine.settings import Recoveries
from mlsys_orca.engine.streams import EngineStats, Streams
from mlsys_orca.engine.watching.remote import RemoteScore
from mlsys_orca.scheduling.batch import FinishedBy, IterationOutput


@dataclass(frozen=True, slots=True)
class Listeners:
    """Objects that hear of all replicas' requests."""

    streams: Streams
    stats: EngineStats
    recoveries: Recoveries
    score: RemoteScore

    def on_output(self, output: IterationOutput) -> None:
        """Pass an iteration's items on to who reads them."""
        self.streams.on_output(None, output, 0.0)

    def on_iteration(self, number: int, live_of: Mapping[int, LiveRequest], report: wire.Iteration) -> None:
        """Note an iteration of a replica before its effect is known: in the traces of requests, and on the score."""
        self.score.ran_at(number, live_of, report)
        if self.stats.traces.has_traced:
            handles = report.handles()
            names = [live_of[handle].request.request_id if handle in live_of else "" for handle in handles]
            self.stats.traces.note_batch(names, report.started_s, report.ended_s)

    def on_advanced(self, live: LiveRequest) -> None:
        """Note that a request goes on, if a death had held it up."""
        if live.stalled_s:
            stall_s, live.stalled_s = time.monotonic() - live.stalled_s, 0.0
            self.recoveries.longest_stall_s = max(self.recoveries.longest_stall_s, stall_s)

    def on_done(self, live: LiveRequest, reason: FinishedBy) -> None:
        """Pass on that a request's answer is complete."""
        finished: Finished[Any] = Finished(live.request.request_id, FinishReason.DONE, live.result(reason))
        self.streams.on_finished(finished, time.monotonic())

    def on_left(self, live: LiveRequest, reason: FinishReason, error: BaseException | None) -> None:
        """Pass on that a request has left without its whole answer."""
        self.streams.on_finished(Finished(live.request.request_id, reason, error=error), time.monotonic())
