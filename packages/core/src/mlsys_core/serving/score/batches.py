"""Watching of engines whose batches need no more to be drawn than who was in them: all but Orca."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlsys_core.serving.score.board import Board
from mlsys_core.serving.score.events import Kind, Square
from mlsys_core.serving.tracing.record import EngineTraces


class BatchSource:
    """Source of one engine's batches; a :class:`~mlsys_core.serving.tracing.record.Watcher` of its requests.

    Args:
        traces: the engine's.
        label_of: names a batch: its stage, its cells.
        lane: number of the engine among those of a server.

    Example:
        >>> traces = EngineTraces(lambda batch: batch)
        >>> board = Board(system="dvabatch", unit="task", sources=lambda: [BatchSource(traces)])
        >>> board.look()
        >>> traces.on_batch(["a", "b"], 1.0, 1.5)
        >>> [square.row for square in board.snapshot()["columns"][0]["squares"]]
        [1, 2]
    """

    def __init__(self, traces: EngineTraces, *, label_of: Callable[[Any], str] = lambda _: "", lane: int = 0) -> None:
        self._traces, self._label_of, self._lane = traces, label_of, lane
        self._board: Board | None = None

    @property
    def is_idle(self) -> bool:
        """True if nobody looks on."""
        return self._traces.watcher is not self

    def begin(self, board: Board) -> None:
        """See :class:`~.board.Source`."""
        self._board, self._traces.watcher = board, self

    def end(self) -> None:
        """See :class:`~.board.Source`."""
        self._traces.watcher = None

    def opened(self, request_id: str, **facts: Any) -> None:
        """Note that a request was submitted."""
        if self._board is not None:
            self._board.opened(request_id)

    def ran(self, batch: Any, request_ids: Sequence[str], started_s: float, ended_s: float) -> None:
        """Note a batch."""
        board = self._board
        if board is None:
            return
        squares = [Square(board.row(request_id).number, Kind.DECODE, 1) for request_id in request_ids]
        cause = self._label_of(batch) or board.unit
        split_ms = {cause: 1000 * (ended_s - started_s)}
        board.add(started_s, ended_s, squares, split_ms=split_ms, lane=self._lane, label=cause)

    def closed(self, request_id: str, reason: str) -> None:
        """Note that a request has left."""
        if self._board is not None:
            self._board.closed(request_id, reason)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchSource) and other._traces is self._traces

    def __hash__(self) -> int:
        return id(self._traces)
