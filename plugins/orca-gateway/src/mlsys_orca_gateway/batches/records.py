"""Batches as clients see them, the states they go through, and the room that their requests find. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"]
ENDED: frozenset[Status] = frozenset({"completed", "failed", "cancelled", "expired"})
_NEXT: dict[Status, frozenset[Status]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling", "expired"}),
    "in_progress": frozenset({"finalizing", "cancelling", "expired", "failed"}),
    "finalizing": frozenset({"completed", "failed"}),
    "cancelling": frozenset({"cancelled", "failed"}),
}
WINDOW_S = 24 * 3600  # of "24h"
MAX_YIELDS = 3  # times that one request makes room for clients; then it runs to its end


class BatchError(BaseModel):
    """A reason why a batch failed as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # of the input file, from 1


class BatchErrors(BaseModel):
    """All of them, or the first hundred."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Numbers of a batch's requests."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(BaseModel):
    """A batch, as ``GET /v1/batches/ID`` answers. Times are seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None  # of the first request
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

    @property
    def is_ended(self) -> bool:
        """True if nothing more happens to it."""
        return self.status in ENDED

    @property
    def ended_at(self) -> int | None:
        """Time of its end."""
        return self.completed_at or self.failed_at or self.cancelled_at or self.expired_at


class KeptBatch(BaseModel):
    """A batch with what is nobody's business but the server's."""

    batch: Batch
    owner: str | None  # digest of a key; None: all
    output_keep_s: int | None = None  # of its files, as the client asked

    def moved(self, status: Status, now_s: float, **changes: object) -> KeptBatch:
        """Return it in another state.

        Args:
            status: The next one.
            now_s: Time, which is noted as ``<status>_at``.
            changes: Further fields of the batch.

        Raises:
            ValueError: no such step leads from its state.
        """
        if status not in _NEXT.get(self.batch.status, ()):
            raise ValueError(f"a batch that is {self.batch.status!r} does not become {status!r}")
        update = {"status": status, f"{status}_at": int(now_s), **changes}
        return self.model_copy(update={"batch": self.batch.model_copy(update=update)})


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine at one moment."""

    num_at_once: int  # requests in iterations
    num_unfinished: int  # requests of the engine, those of batches among them
    num_of_batches: int  # of them, or about to be

    @property
    def num_interactive(self) -> int:
        """Requests of clients."""
        return max(0, self.num_unfinished - self.num_of_batches)


def may_start(load: Load, weight: int) -> bool:
    """Return True if a request of a batch that makes ``weight`` answers finds room that nobody else wants.

    One that is larger than an iteration runs when nothing else does.

    Example:
        >>> may_start(Load(num_at_once=8, num_unfinished=7, num_of_batches=5), 1)
        True
        >>> may_start(Load(num_at_once=8, num_unfinished=7, num_of_batches=5), 2)
        False
    """
    if not load.num_interactive and not load.num_of_batches:
        return True
    return load.num_interactive + load.num_of_batches + weight <= load.num_at_once


def to_yield(load: Load, running: Sequence[tuple[int, int]]) -> int:
    """Return how many requests of batches, the youngest, should leave so that clients do not wait for them.

    Args:
        load: The engine's.
        running: Of each running request of a batch, the oldest first: the answers it makes, and how often it has left.

    Example:
        >>> to_yield(Load(num_at_once=4, num_unfinished=5, num_of_batches=3), [(1, 0), (1, 0), (1, 0)])
        1
    """
    excess = load.num_unfinished - load.num_at_once
    if not load.num_interactive or excess <= 0:
        return 0
    excess, num = min(excess, load.num_interactive), 0
    for weight, num_yields in reversed(running):
        if excess <= 0 or num_yields >= MAX_YIELDS:
            break
        excess, num = excess - weight, num + 1
    return num
