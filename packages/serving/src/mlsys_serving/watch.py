"""Watching of an engine's batches, for pages that draw them: the engine's side.

An engine notes events in its log (:mod:`.watch_log`): who came, what ran, who left. While nobody looks, the log keeps
the latest few; a board (:class:`Board`: what an extension brings) takes them while somebody does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from mlsys_serving.watch_log import EventLog


class Kind(StrEnum):
    """Part of a request in a batch, by its letter on the wire."""

    PREFILL = "p"
    DECODE = "d"  # one token after others; in other systems than Orca, a request's part of any batch
    GUESSED = "g"  # a decode with accepted draft tokens
    PREEMPTED = "x"  # not run: its K/V blocks went to others
    RECOVERED = "r"  # computes again what a preemption or the death of a worker has cost


class Square(NamedTuple):
    """Part of one request in one batch; encoded as a JSON list."""

    row: int  # the request's number
    kind: Kind
    num_tokens: int  # rows of the batch; GUESSED: tokens that came, accepted drafts among them; PREEMPTED: 0
    num_guesses: int = 0  # draft tokens, accepted or not


class Row(Protocol):
    """A request on a board."""

    @property
    def number(self) -> int:
        """Number of the request, from 1."""
        ...


class Board(Protocol):
    """Where an engine's events go while somebody looks."""

    @property
    def unit(self) -> str:
        """Name of a batch: ``iteration``, ``round``, ``task``."""
        ...

    def row(self, request_id: str, **facts: int | None) -> Row:
        """Return the row of a request that has not left."""
        ...

    def opened(self, request_id: str, *, at_s: float | None = None, **facts: int | None) -> None:
        """Note that a request was submitted."""
        ...

    def found(self, request_id: str, *, is_waiting: bool, **facts: int | None) -> None:
        """Note a request that is there, of which no event may have been told."""
        ...

    def closed(self, request_id: str, reason: str, *, at_s: float | None = None) -> None:
        """Note that a request has left."""
        ...

    def note_cached(self, row: Any, num_tokens: int) -> None:
        """Note the number of a prompt's tokens that were found in cached blocks."""
        ...

    def add(
        self,
        start_s: float,
        end_s: float,
        squares: Sequence[Square],
        *,
        split_ms: Mapping[str, float],
        lane: int = 0,
        label: str = "",
        num_free_blocks: int | None = None,
        tables: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Note a batch: its begin and end in seconds of the clock, its requests, its milliseconds by cause."""
        ...


class Source(Protocol):
    """An engine that can be watched: its events go through its log."""

    log: EventLog

    def begin(self, board: Board) -> None:
        """Note the board that events are for, before the first is told. Idempotent."""
        ...

    def find(self) -> None:
        """Note requests that are there, of which no event was kept; with the board's lock held, without waiting."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Sources and facts by which a page watches the batches of one server."""

    unit: str  # name of a batch: "iteration", "round", "task"
    sources: Callable[[], Iterable[Source]] = tuple  # the engines; asked for each time that somebody comes
    facts: Callable[[], Mapping[str, Any]] = dict  # model, policy, limits, for who looks


class BatchSource:
    """Source of one engine's batches, where only the names of a batch's requests matter: all systems but Orca.

    A :class:`~mlsys_serving.tracing.record.Watcher` of its requests.

    Args:
        label_of: Names a batch: its stage, its cells.
    """

    def __init__(self, *, label_of: Callable[[Any], str]) -> None:
        self.log = EventLog()
        self._label_of = label_of
        self._board: Board | None = None

    def begin(self, board: Board) -> None:
        """See :class:`Source`."""
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
        self._board.opened(str(request_id), at_s=at_s)

    def _ran(self, label: str, request_ids: Sequence[Hashable], started_s: float, ended_s: float) -> None:
        board = self._board
        assert board is not None
        squares = [Square(board.row(str(each)).number, Kind.DECODE, 1) for each in request_ids]
        cause = label or board.unit
        split_ms = {cause: 1000 * (ended_s - started_s)}
        board.add(started_s, ended_s, squares, split_ms=split_ms, label=cause)

    def _closed(self, request_id: Hashable, reason: str, at_s: float) -> None:
        assert self._board is not None
        self._board.closed(str(request_id), reason, at_s=at_s)
