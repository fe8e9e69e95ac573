"""Store of a server's recent columns, and of who looks at them.

Engines write (from any thread) while somebody looks, and only then; pages read what is new by a cursor. When the first
viewer comes, :class:`Source` objects tell what their logs have kept and go on live; a while after the last has left,
they keep their latest events again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from mlsys_serving.watch import Source, Square
from mlsys_serving.watch_log import Event

from mlsys_score.events import FORMAT, VERSION, Column, Row, TableChange

_NAME_LENGTH = 8  # last characters of a request's id that are shown


Cursor = tuple[float, int, int]  # the board's begin, columns and changes of rows so far


class Board:
    """Recent columns of a server: a ring. From any thread.

    Args:
        system: ``orca``, ``batchmaker``, ``dvabatch`` or ``windtunnel``, for the page.
        unit: the name of a column: ``iteration``, ``round``, ``task``.
        facts: what the page shows beside it: model, policy, limits; asked for when somebody comes.
        sources: returns the engines, each time that somebody comes.
        max_columns: size of the ring.
        clock: of the engines, in seconds.

    Example:
        >>> board = Board(system="orca", unit="iteration", clock=lambda: 1.0)
        >>> row = board.row("chatcmpl-1")
        >>> board.add(1.0, 1.5, [Square(row.number, "d", 1)], split_ms={"decode": 500.0})
        >>> board.snapshot()["columns"][0]["ms"]
        500.0
    """

    def __init__(
        self,
        *,
        system: str,
        unit: str,
        facts: Callable[[], Mapping[str, Any]] = dict,
        sources: Callable[[], Iterable[Source]] = tuple,
        max_columns: int = 2048,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.system, self.unit = system, unit
        self._facts, self._sources, self._clock, self._max_columns = facts, sources, clock, max_columns
        self._lock = threading.RLock()  # held while an engine's event is told: logs know it
        self._watched: list[Source] = []
        self.num_viewers = 0
        self.is_closed = False  # the server drains: viewers leave
        self._clear()

    def _start_at(self, at_s: float) -> None:
        self.origin_s = at_s
        self._started_unix_s = time.time() - (self._clock() - at_s)

    def _clear(self) -> None:
        self._start_at(self._clock())
        self._rows: dict[int, Row] = {}
        self._by_id: dict[str, Row] = {}  # of requests that have not left
        self._waiting: set[int] = set()
        self._columns: deque[Column] = deque()
        self._tables: dict[int, tuple[int, ...]] = {}  # block tables after the last column, by row
        self._first_tables: dict[int, tuple[int, ...]] = {}  # and before the first of the ring
        self._num_columns = self._num_rows = 0
        self._changes: deque[Row] = deque(maxlen=4 * self._max_columns)  # rows that changed, in order
        self._num_changes = 0

    # --- viewers

    def look(self) -> None:
        """Note that one more looks on; for the first, engines tell what they have kept and go on live."""
        with self._lock:
            self.num_viewers += 1
            new = [source for source in self._sources() if source not in self._watched]
            if not self._watched and any(source.log.has_lost for source in new):
                self._clear()  # between what is here and what was kept something is missing
            events: list[Event] = []
            for source in new:
                source.begin(self)
                events.extend(source.log.begin(self._lock))
            events.sort(key=lambda event: event.at_s)
            is_empty = not self._num_columns and not self._num_rows
            for event in events:
                event.call(*event.args)
            if is_empty and events:
                self._start_at(min([events[0].at_s, *(column.start_s for column in self._columns)]))
            for source in new:
                source.find()
            self._watched += new

    def look_away(self) -> None:
        """Note that one has left; :meth:`rest` then ends the watching."""
        with self._lock:
            self.num_viewers -= 1

    def rest(self) -> None:
        """Watch no longer, if nobody looks on; what is on the board stays until somebody comes."""
        with self._lock:
            if not self.num_viewers:
                for source in self._watched:
                    source.log.end()
                self._watched = []

    def close(self) -> None:
        """Have all viewers leave: the server drains."""
        self.is_closed = True

    @property
    def is_watched(self) -> bool:
        """True if engines write to the board."""
        return bool(self._watched)

    # --- engines

    def row(self, request_id: str, **facts: int | None) -> Row:
        """Return the row of a request that has not left; one that nobody saw come gets its row now."""
        row = self._by_id.get(request_id)
        return self._open(request_id, None, facts) if row is None else row

    def opened(self, request_id: str, *, at_s: float | None = None, **facts: int | None) -> None:
        """Note that a request was submitted: now, or at ``at_s``."""
        with self._lock:
            if request_id not in self._by_id:
                row = self._open(request_id, self._clock() if at_s is None else at_s, facts)
                self._waiting.add(row.number)

    def found(self, request_id: str, *, is_waiting: bool, **facts: int | None) -> None:
        """Note a request that is there, of which no event may have been told."""
        with self._lock:
            row = self.row(request_id, **facts)
            if is_waiting:
                self._waiting.add(row.number)

    def closed(self, request_id: str, reason: str, *, at_s: float | None = None) -> None:
        """Note that a request has left, now or at ``at_s``; unknown ids are ignored."""
        with self._lock:
            row = self._by_id.pop(request_id, None)
            if row is not None:
                row.ended_s, row.reason = self._clock() if at_s is None else at_s, reason
                self._waiting.discard(row.number)
                self._tables.pop(row.number, None)
                self._changed(row)

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
        """Add a column.

        Args:
            start_s: When it began to run, on the clock.
            end_s: When it ended.
            squares: The requests in it, and those that were preempted before it.
            split_ms: Its milliseconds by cause.
            lane: Replica, worker or model.
            label: Name of the stage or model.
            num_free_blocks: K/V blocks that nobody holds.
            tables: Whole block tables by row, of the requests whose table may have changed.
        """
        with self._lock:
            self._num_columns += 1
            for square in squares:
                row = self._rows.get(square.row)
                if row is not None:
                    row.last_column = self._num_columns
                if square.num_tokens:
                    self._waiting.discard(square.row)
                else:
                    self._waiting.add(square.row)
                    self._tables.pop(square.row, None)
            changes = []
            for number, table in (tables or {}).items():
                change = TableChange.between(number, self._tables.get(number, ()), table)
                if change is not None:
                    changes.append(change)
                    self._tables[number] = table
            self._columns.append(
                Column(
                    number=self._num_columns,
                    start_s=start_s,
                    end_s=end_s,
                    lane=lane,
                    label=label,
                    split_ms=split_ms,
                    squares=tuple(squares),
                    num_waiting=len(self._waiting),
                    num_free_blocks=num_free_blocks,
                    tables=tuple(changes),
                )
            )
            if len(self._columns) > self._max_columns:
                self._forget(self._columns.popleft())

    def _open(self, request_id: str, opened_s: float | None, facts: Mapping[str, int | None]) -> Row:
        with self._lock:
            self._num_rows += 1
            row = Row(self._num_rows, request_id[-_NAME_LENGTH:], opened_s)
            row.num_prompt_tokens, row.max_new_tokens = facts.get("num_prompt_tokens"), facts.get("max_new_tokens")
            self._rows[row.number] = self._by_id[request_id] = row
            self._changed(row)
            return row

    def note_cached(self, row: Row, num_tokens: int) -> None:
        """Note how much of a request's prompt was found in kept blocks."""
        with self._lock:
            row.num_cached_tokens = num_tokens
            self._changed(row)

    def _changed(self, row: Row) -> None:
        self._num_changes += 1
        self._changes.append(row)

    def _forget(self, column: Column) -> None:
        """Forget what only the oldest column needed."""
        for change in column.tables:
            table = self._first_tables.get(change.row, ())
            self._first_tables[change.row] = (*table[: change.first], *change.blocks)
        if column.number % 64 == 0:
            gone = [
                row.number
                for row in self._rows.values()
                if row.ended_s is not None and row.last_column <= column.number
            ]
            for number in gone:
                del self._rows[number]
                self._first_tables.pop(number, None)

    # --- pages

    def snapshot(self) -> dict[str, Any]:
        """Return all that is on the board: a recording, in its JSON form."""
        with self._lock:
            facts = dict(self._facts())
            return {
                "format": FORMAT,
                "version": VERSION,
                "system": self.system,
                "unit": self.unit,
                "facts": facts,
                "started": self._started_unix_s,
                "now": round(1000 * (self._clock() - self.origin_s), 3),
                "waiting": len(self._waiting),
                "rows": [row.to_wire(self.origin_s) for row in self._rows.values()],
                "tables": [[row, list(blocks)] for row, blocks in self._first_tables.items()],
                "columns": [column.to_wire(self.origin_s) for column in self._columns],
            }

    def read(self, cursor: Cursor | None) -> tuple[dict[str, Any], Cursor, bool]:
        """Return what came after ``cursor``, the next cursor, and True if it is a snapshot, as too much came.

        Args:
            cursor: As returned before; None: from the beginning.
        """
        with self._lock:
            latest = (self.origin_s, self._num_columns, self._num_changes)
            if cursor is None or cursor[0] != self.origin_s:
                return self.snapshot(), latest, True
            num_columns, num_changes = latest[1] - cursor[1], latest[2] - cursor[2]
            if num_columns > len(self._columns) or num_changes > len(self._changes):
                return self.snapshot(), latest, True
            columns = [self._columns[index] for index in range(len(self._columns) - num_columns, len(self._columns))]
            changed = {row.number: row for row in islice(reversed(self._changes), num_changes)}
            delta = {
                "now": round(1000 * (self._clock() - self.origin_s), 3),
                "waiting": len(self._waiting),
                "rows": [row.to_wire(self.origin_s) for row in changed.values()],
                "columns": [column.to_wire(self.origin_s) for column in columns],
            }
            return delta, latest, False
