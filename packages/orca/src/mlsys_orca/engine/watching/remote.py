"""The score of an engine in worker processes, from what they report. In the front's event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from mlsys_orca.engine import wire
from mlsys_orca.engine.recovery import LiveRequest
from mlsys_orca.engine.watching.feed import IterationFeed, Part
from mlsys_serving.tracing import EngineTraces
from mlsys_serving.watch import Board
from mlsys_serving.watch_log import EventLog


class RemoteScore:
    """Source of all replicas' iterations: :class:`mlsys_serving.watch.Source`.

    Args:
        traces: Requests are told to it, by the streams.
        live: Returns the requests that have not ended.
    """

    def __init__(self, traces: EngineTraces, live: Callable[[], Iterable[LiveRequest]]) -> None:
        self.log, self._feed, self._live = EventLog(), IterationFeed(), live
        traces.watcher = self

    def begin(self, board: Board) -> None:
        """Note the board that iterations are for."""
        self._feed.board = board

    def find(self) -> None:
        """Note who is there."""
        for live in self._live():
            self._feed.board.found(
                live.request.request_id,
                is_waiting=not live.has_begun,
                num_prompt_tokens=len(live.request.prompt_token_ids),
                max_new_tokens=live.request.max_new_tokens,
            )

    def opened(self, request_id: str, **facts: Any) -> None:
        """Note that a request was submitted."""
        now_s = perf_counter()
        self.log.note(now_s, self._feed.opened, request_id, now_s, facts)

    def closed(self, request_id: str, reason: str) -> None:
        """Note that a request has left."""
        now_s = perf_counter()
        self.log.note(now_s, self._feed.closed, request_id, reason, now_s)

    def preempted(self, request_id: str) -> None:
        """Note that a request's K/V blocks go to others."""
        self.log.note(perf_counter(), self._feed.preempted, request_id)

    def interrupted(self, request_id: str) -> None:
        """Note that the worker that ran a request has died."""
        self.log.note(perf_counter(), self._feed.interrupted, request_id)

    def ran(self, batch: Any, request_ids: Sequence[str], started_s: float, ended_s: float) -> None:
        """Do nothing: iterations come as reports."""

    def ran_at(self, number: int, live_of: Mapping[int, LiveRequest], report: wire.Iteration) -> None:
        """Note an iteration of a replica, before its effect on ``live_of``."""
        parts = parts_of(live_of, report)  # now, as live_of changes
        free = report.counts.num_free_blocks
        self.log.note(report.ended_s, self._feed.add, report.started_s, report.ended_s, parts, free, number)


def parts_of(live_of: Mapping[int, LiveRequest], report: wire.Iteration) -> list[Part]:
    """Return what ran of each request, by what its front knows of it from before. Pure."""
    num_new = Counter(token.handle for token in report.tokens)
    cached = {token.handle: token.num_cached_tokens for token in report.tokens if token.num_cached_tokens}
    seals = {state.handle: state for state in report.seals}
    parts = []
    for handle in dict.fromkeys([*seals, *num_new]):
        live = live_of.get(handle)
        if live is None:
            continue
        state = seals.get(handle)  # None: the request has ended by this iteration
        num_left = len(live.request.prompt_token_ids) + len(live.tokens) - live.num_computed_tokens
        is_decode = num_left <= 1 and live.num_computed_tokens > 0
        if state is not None and state.num_rows:
            num_rows = state.num_rows
        else:
            num_rows = num_new[handle] if is_decode else num_left - cached.get(handle, 0)
        table = live.block_table if state is None or state.block_table is None else state.block_table
        parts.append(
            Part(
                live.request.request_id,
                max(1, num_rows),
                is_decode,
                num_new[handle],
                tuple(table),
                cached.get(handle, 0),
                len(live.request.prompt_token_ids),
                live.request.max_new_tokens,
            )
        )
    return parts
