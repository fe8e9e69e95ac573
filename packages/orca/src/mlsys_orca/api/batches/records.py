"""Batches as clients see them, the states they go through, and the records of a batch's log. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator
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
_STATE, _RESULT = b"S", b"R"
_RESULT_HEADER = struct.Struct("<IB")  # index of the request, 1 if it failed


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


def state_record(kept: KeptBatch) -> bytes:
    """Return the record that says how a batch stands; the last one in a log holds."""
    return _STATE + kept.model_dump_json().encode()


def result_record(index: int, line: bytes, *, has_failed: bool) -> bytes:
    r"""Return the record of one request's end.

    Args:
        index: Of the request, from 0.
        line: Its line in the output or error file, without the line end.
        has_failed: It belongs into the error file.

    Example:
        >>> next(results([(result_record(3, b"{}", has_failed=False), 0)]))
        (3, False, b'{}')
    """
    return _RESULT + _RESULT_HEADER.pack(index, has_failed) + line


def state_of(payload: bytes) -> KeptBatch | None:
    """Return the state in a record; None: it is another kind of record."""
    return KeptBatch.model_validate_json(payload[1:]) if payload[:1] == _STATE else None


def result_of(payload: bytes) -> tuple[int, bool] | None:
    """Return the index of the request that a record ends, and True if it failed; None: another kind of record."""
    if payload[:1] != _RESULT:
        return None
    index, has_failed = _RESULT_HEADER.unpack_from(payload, 1)
    return index, bool(has_failed)


def results(payloads: Iterator[tuple[bytes, int]] | list[tuple[bytes, int]]) -> Iterator[tuple[int, bool, bytes]]:
    """Yield index, failure and line of all results among a log's payloads."""
    for payload, _ in payloads:
        if (found := result_of(payload)) is not None:
            yield *found, payload[1 + _RESULT_HEADER.size :]
