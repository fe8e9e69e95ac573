"""The batch table: which requests form which batch, and how far each is (DVABatch, section 5.2.1).

Plain data. :mod:`mlsys_dvabatch.scheduling.pipeline` moves parts of batches between the stages and is the only writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlsys_core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Part:
    """An item of a batch queue: some requests of one batch that run a stage together."""

    batch_id: int
    start: int  # position of its first request in the batch when it was pushed
    requests: tuple[str, ...]  # their ids, in the order of their positions

    @property
    def num(self) -> int:
        """Number of requests in it."""
        return len(self.requests)

    @property
    def item(self) -> tuple[int, int, int]:
        """(id, start, num), as the paper writes an item."""
        return self.batch_id, self.start, self.num


@dataclass(slots=True)
class Row:
    """One batch that is on its way."""

    batch_id: int
    created_s: float  # seconds of the loop's clock; children of a split keep their parent's
    num_stages: int
    padded_length: int  # units to which every request of it is padded
    progress: dict[str, int] = field(default_factory=dict)  # request id -> stages completed, in order of position
    can_stretch: bool = True  # False once a split is foreseen; children of a split inherit it
    held_after: int | None = None  # the stage after which the earlier part waits for those that catch up
    follows: int | None = None  # the sibling that must have left before this one runs: the serial manner of a split
    is_passing: bool = False  # at work in several stages in one go
    pair: int | None = None  # the buffer pair it moves through; None until its first part starts

    @property
    def size(self) -> int:
        """The paper's ``bs``."""
        return len(self.progress)

    @property
    def status_map(self) -> tuple[int, ...]:
        """Number of its requests that have completed each stage."""
        return tuple(sum(done > stage for done in self.progress.values()) for stage in range(self.num_stages))

    def part(self, requests: Sequence[str] | None = None) -> Part:
        """Return the given requests of it, or all, as an item."""
        if requests is None:
            return Part(self.batch_id, 0, tuple(self.progress))
        return Part(self.batch_id, list(self.progress).index(requests[0]), tuple(requests))


class BatchTable:
    """Rows in the order they were made; the three meta-operations on rows alone (section 5.2.2).

    Example:
        >>> table = BatchTable(num_stages=3)
        >>> row = table.new(["a", "b"], created_s=0.0)
        >>> row.size, row.status_map
        (2, (0, 0, 0))
    """

    def __init__(self, num_stages: int) -> None:
        if num_stages < 1:
            raise InvalidInputError(f"num_stages={num_stages}: a model has at least 1 stage")
        self.num_stages = num_stages
        self.rows: dict[int, Row] = {}
        self.batch_of: dict[str, int] = {}  # request id -> id of its batch
        self._next_id = 0

    def __getitem__(self, batch_id: int) -> Row:
        return self.rows[batch_id]

    @property
    def latest(self) -> Row | None:
        """The row made last, the only one that may be stretched."""
        return self.rows[next(reversed(self.rows))] if self.rows else None

    @property
    def num_requests(self) -> int:
        """Requests in all rows."""
        return len(self.batch_of)

    def new(
        self, requests: Sequence[str], *, created_s: float, padded_length: int = 1, can_stretch: bool = True
    ) -> Row:
        """Add a row of ``requests``, none of which has completed a stage."""
        row = Row(self._next_id, created_s, self.num_stages, padded_length, can_stretch=can_stretch)
        self._next_id += 1
        self.rows[row.batch_id] = row
        self._append(row, requests, done=0)
        return row

    def stretch(self, requests: Sequence[str]) -> Row:
        """Add ``requests``, which have completed no stage, to the latest row."""
        row = self.latest
        assert row is not None
        assert row.can_stretch
        self._append(row, requests, done=0)
        return row

    def split(self, row: Row, groups: Sequence[Sequence[str]], *, serial: bool) -> list[Row]:
        """Replace ``row`` by one row for each group, in order; together they hold all its requests, at equal progress.

        Serial: each follows the one before, and the first what ``row`` followed.
        """
        done = next(iter(row.progress.values()))
        assert all(progress == done for progress in row.progress.values())
        assert sorted(request for group in groups for request in group) == sorted(row.progress)
        self.drop(row)
        children: list[Row] = []
        for group in groups:
            child = Row(self._next_id, row.created_s, self.num_stages, row.padded_length, can_stretch=False)
            child.follows = children[-1].batch_id if serial and children else row.follows
            child.pair = row.pair
            self._next_id += 1
            self.rows[child.batch_id] = child
            self._append(child, group, done=done)
            children.append(child)
        for other in self.rows.values():  # batches that followed the parent follow its last child
            if other.follows == row.batch_id:
                other.follows = children[-1].batch_id
        return children

    def remove(self, request: str) -> Row:
        """Take a request out of its row, which stays even when it is empty then."""
        row = self.rows[self.batch_of.pop(request)]
        del row.progress[request]
        return row

    def drop(self, row: Row) -> None:
        """Take a row out."""
        del self.rows[row.batch_id]
        for request in row.progress:
            del self.batch_of[request]

    def _append(self, row: Row, requests: Sequence[str], *, done: int) -> None:
        assert requests
        for request in requests:
            if request in self.batch_of:
                raise InvalidInputError(f"request {request!r} is in batch {self.batch_of[request]} already")
            row.progress[request] = done
            self.batch_of[request] = row.batch_id
