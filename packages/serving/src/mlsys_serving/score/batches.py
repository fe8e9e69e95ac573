"""Watching of engines whose batches need no more to be drawn than who was in them: all but Orca."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any

from mlsys_serving.score.board import Board
from mlsys_serving.score.events import Kind, Square
from mlsys_serving.score.log import EventLog


class BatchSource:
    """Source of one engine's batches; a :class:`~mlsys_core.tracing.record.Watcher` of its requests.

    Args:
        label_of: names a batch: its stage, its cells.
        lane: number of the engine among those of a server.
        name_of: names a request by its id.

    Example:
        >>> from mlsys_core.tracing import EngineTraces
        >>> traces = EngineTraces(lambda batch: batch, watcher=(source := BatchSource()))
        >>> traces.on_batch(["a"], 0.5, 1.0)
        >>> board = Board(system="dvabatch", unit="task", sources=lambda: [source])
        >>> board.look()
        >>> traces.on_batch(["a", "b"], 1.0, 1.5)
        >>> [[square.row for square in column["squares"]] for column in board.snapshot()["columns"]]
        [[1], [1, 2]]
    """

    def __init__(
        self,
        *,
        label_of: Callable[[Any], str] = lambda _: "",
        lane: int = 0,
        name_of: Callable[[Any], str] = str,
    ) -> None:
        self.log = EventLog()
        self._label_of, self._lane, self._name_of = label_of, lane, name_of
        self._board: Board | None = None

    def begin(self, board: Board) -> None:
        """See :class:`~.board.Source`."""
        self._board = board

    def find(self) -> None:
        """Do nothing: a request that nobody saw come gets its row with its first batch."""

    def opened(self, request_id: Hashable, **facts: Any) -> None:
        """Note that a request was submitted."""
        now_s = perf_counter()
        self.log.note(now_s, self._opened, request_id, now_s)

    def ran(self, batch: Any, request_ids: Sequence[Hashable], started_s: float, ended_s: float) -> None:
        """Note a batch."""
        self.log.note(ended_s, self._ran, self._label_of(batch), request_ids, started_s, ended_s)

    def closed(self, request_id: Hashable, reason: str) -> None:
        """Note that a request has left."""
        now_s = perf_counter()
        self.log.note(now_s, self._closed, request_id, reason, now_s)

    def _opened(self, request_id: Hashable, at_s: float) -> None:
        assert self._board is not None
        self._board.opened(self._name_of(request_id), at_s=at_s)

    def _ran(self, label: str, request_ids: Sequence[Hashable], started_s: float, ended_s: float) -> None:
        board = self._board
        assert board is not None
        squares = [Square(board.row(self._name_of(each)).number, Kind.DECODE, 1) for each in request_ids]
        cause = label or board.unit
        split_ms = {cause: 1000 * (ended_s - started_s)}
        board.add(started_s, ended_s, squares, split_ms=split_ms, lane=self._lane, label=cause)

    def _closed(self, request_id: Hashable, reason: str, at_s: float) -> None:
        assert self._board is not None
        self._board.closed(self._name_of(request_id), reason, at_s=at_s)
