"""The score of an engine in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import MlsysError
from mlsys_core.serving.score import Board
from mlsys_core.serving.tracing import EngineTraces
from mlsys_orca.engine.score.feed import IterationFeed, Part
from mlsys_orca.engine.streams import Streams
from mlsys_orca.scheduling.batch import IterationBatch, IterationOutput, RequestSlice

if TYPE_CHECKING:
    from mlsys_orca.engine.core import EngineCore


class LocalScore:
    """Source of a local engine's iterations: :class:`mlsys_core.serving.score.Source`.

    Args:
        core: The engine.
        streams: Its listener, which hears of each iteration's output.
        traces: Tell when an iteration ran.
    """

    def __init__(self, core: EngineCore, streams: Streams, traces: EngineTraces) -> None:
        self._core, self._streams, self._traces = core, streams, traces
        self._feed: IterationFeed | None = None
        self._ran: tuple[IterationBatch | None, float, float] = None, 0.0, 0.0  # the last iteration, and when it ran

    def begin(self, board: Board) -> None:
        """Write every iteration to ``board`` from now on. Idempotent."""
        if self._traces.watcher is self:
            return
        self._feed = IterationFeed(board)
        try:
            self._core.loop.call(self._find)
        except MlsysError:  # the engine has stopped: nothing will come
            return
        self._traces.watcher, self._streams.tap = self, self._on_output

    def end(self) -> None:
        """Write no more."""
        self._traces.watcher, self._streams.tap, self._feed = None, None, None

    def _find(self) -> None:
        """Note who is there already; in the loop's thread."""
        pool, feed = self._core.pool, self._feed
        if pool is None or feed is None:
            return
        for request_id, sequence in pool.sequences.items():
            feed.board.found(
                request_id,
                is_waiting=not sequence.block_table,
                num_prompt_tokens=len(sequence.request.prompt_token_ids),
                max_new_tokens=sequence.request.max_new_tokens,
            )

    def opened(self, request_id: str, **facts: Any) -> None:
        """Note that a request was submitted."""
        if (feed := self._feed) is not None:
            feed.board.opened(request_id, **facts)

    def closed(self, request_id: str, reason: str) -> None:
        """Note that a request has left."""
        if (feed := self._feed) is not None:
            feed.board.closed(request_id, reason)

    def preempted(self, request_id: str) -> None:
        """Note that a request's K/V blocks go to others."""
        if (feed := self._feed) is not None:
            feed.preempted(request_id)

    def ran(self, batch: IterationBatch, request_ids: Sequence[str], started_s: float, ended_s: float) -> None:
        """Keep when an iteration ran, until its output is heard of."""
        self._ran = batch, started_s, ended_s

    def _on_output(self, batch: IterationBatch, output: IterationOutput) -> None:
        ran, started_s, ended_s = self._ran
        feed = self._feed
        if ran is not batch or feed is None:
            return
        feed.add(started_s, ended_s, parts_of(batch, output), num_free_blocks=self._core.block_tables.num_free_blocks)


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
