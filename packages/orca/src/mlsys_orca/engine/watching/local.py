"""The score of an engine in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mlsys_orca.engine.streams import Streams
from mlsys_orca.engine.watching.feed import IterationFeed, Part
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput, RequestSlice
from mlsys_serving.tracing import EngineTraces
from mlsys_serving.watch import Board
from mlsys_serving.watch_log import EventLog

if TYPE_CHECKING:
    from mlsys_orca.engine.core import EngineCore


class LocalScore:
    """Source of a local engine's iterations: :class:`mlsys_serving.watch.Source`.

    Args:
        core: The engine.
        streams: Its listener, which hears of each iteration's output.
        traces: Tell when an iteration ran.
    """

    def __init__(self, core: EngineCore, streams: Streams, traces: EngineTraces) -> None:
        self.log, self._feed, self._core = EventLog(), IterationFeed(), core
        self._ran: tuple[IterationBatch | None, float, float] = None, 0.0, 0.0  # the last iteration, and when it ran
        traces.watcher, streams.tap = self, self._on_output

    def begin(self, board: Board) -> None:
        """Note the board that iterations are for."""
        self._feed.board = board

    def find(self) -> None:
        """Note who is there."""
        pool = self._core.pool
        for request_id, sequence in [] if pool is None else list(pool.sequences.items()):  # the loop goes on meanwhile
            self._feed.board.found(
                request_id,
                is_waiting=not sequence.block_table,
                num_prompt_tokens=len(sequence.request.prompt_token_ids),
                max_new_tokens=sequence.request.max_new_tokens,
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

    def ran(self, batch: IterationBatch, request_ids: Sequence[str], started_s: float, ended_s: float) -> None:
        """Keep when an iteration ran, until its output is heard of."""
        self._ran = batch, started_s, ended_s

    def _on_output(self, batch: IterationBatch, output: IterationOutput) -> None:
        ran, started_s, ended_s = self._ran
        if ran is batch:
            num_free_blocks = self._core.block_tables.num_free_blocks
            self.log.note(ended_s, self._feed.add, started_s, ended_s, parts_of(batch, output), num_free_blocks)


def parts_of(batch: IterationBatch, output: IterationOutput) -> list[Part]:
    """Return what ran of each request. Pure."""
    num_new = Counter(token.request_id for token in output.sampled)
    return [
        Part(
            part.request_id,
            part.num_tokens,
            _is_decode(part),
            num_new[part.request_id],
            part.block_table,
            part.num_cached_tokens,
        )
        for part in batch.requests
    ]


def _is_decode(part: RequestSlice) -> bool:
    num_sure = part.num_tokens - part.num_draft_tokens
    return num_sure == 1 and part.num_computed_tokens > 0 and part.sampling is not None
