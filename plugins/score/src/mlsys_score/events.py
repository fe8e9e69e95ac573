"""Data of the score: rows are requests, columns batches of the loop, squares the part of a request in a batch.

A column is an iteration in Orca, a round of cells in BatchMaker, a task of a stage in DVABatch. Plain data without a
clock; :class:`~.board.Board` keeps it, the page draws it. Times are seconds of the engine's clock here, and
milliseconds since the board's begin on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlsys_serving.watch import Square

FORMAT, VERSION = "mlsys-score", 1


class TableChange(NamedTuple):
    """Change of a request's block table: from index ``first`` on it is ``blocks``. Encoded as a JSON list."""

    row: int
    first: int
    blocks: tuple[int, ...]

    @classmethod
    def between(cls, row: int, old: tuple[int, ...], new: tuple[int, ...]) -> TableChange | None:
        """Return the difference between two block tables of a request; None: they are equal."""
        if old == new:
            return None
        first = 0
        while first < min(len(old), len(new)) and old[first] == new[first]:
            first += 1
        return cls(row, first, new[first:])


@dataclass(slots=True)
class Row:
    """One request."""

    number: int  # from 1
    name: str  # end of its id: enough to find one's own, not enough to ask for somebody else's
    opened_s: float | None  # when it was submitted; None: before anybody looked
    num_prompt_tokens: int | None = None  # None: it has no tokens, or they are not known
    max_new_tokens: int | None = None
    num_cached_tokens: int = 0  # of the prompt, found in kept blocks
    ended_s: float | None = None
    reason: str | None = None  # why it left
    last_column: int = 0  # the last one with a square of it

    def to_wire(self, origin_s: float) -> dict[str, Any]:
        """Return its JSON form."""
        return {
            "row": self.number,
            "name": self.name,
            "opened": _ms(self.opened_s, origin_s),
            "prompt": self.num_prompt_tokens,
            "max_new": self.max_new_tokens,
            "cached": self.num_cached_tokens,
            "ended": _ms(self.ended_s, origin_s),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One batch."""

    number: int  # from 1
    start_s: float
    end_s: float
    lane: int = 0  # replica, worker, or model
    label: str = ""  # name of the stage or model, if there are several
    split_ms: Mapping[str, float]  # its milliseconds by cause; together its duration
    squares: tuple[Square, ...]
    num_waiting: int  # requests that have not run yet, or were preempted
    num_free_blocks: int | None = None  # None: there are no blocks
    tables: tuple[TableChange, ...] = ()

    def to_wire(self, origin_s: float) -> dict[str, Any]:
        """Return its JSON form; what has its default is left out."""
        wire: dict[str, Any] = {
            "n": self.number,
            "t": _ms(self.start_s, origin_s),
            "ms": round(1000 * (self.end_s - self.start_s), 3),
            "split": {cause: round(part_ms, 3) for cause, part_ms in self.split_ms.items()},
            "squares": self.squares,
            "waiting": self.num_waiting,
        }
        if self.lane:
            wire["lane"] = self.lane
        if self.label:
            wire["label"] = self.label
        if self.num_free_blocks is not None:
            wire["free"] = self.num_free_blocks
        if self.tables:
            wire["tables"] = self.tables
        return wire


def _ms(time_s: float | None, origin_s: float) -> float | None:
    return None if time_s is None else round(1000 * (time_s - origin_s), 3)
