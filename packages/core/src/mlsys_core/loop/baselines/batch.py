"""The batch of the request-level baselines: whole requests, padded to one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from mlsys_core.loop.protocols import WorkerId
from mlsys_core.loop.request import PayloadOut, ServeRequest


@dataclass(frozen=True, slots=True)
class RequestBatch(Generic[PayloadOut]):
    """Requests that an executor runs at once. Its output is a sequence with one result per request, in their order.

    A result that is an exception fails its request alone.

    Example:
        >>> requests = (ServeRequest("a", None, length=21), ServeRequest("b", None, length=24))
        >>> batch = RequestBatch(requests, 30, WorkerId(0))
        >>> batch.size, batch.num_padded_units, batch.padding_waste
        (2, 60, 0.25)
    """

    requests: tuple[ServeRequest[PayloadOut], ...]  # at least one, in the order they were taken from the queue
    padded_length: int  # units to which each is padded, at least the longest length
    worker: WorkerId

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self.requests)

    @property
    def num_units(self) -> int:
        """Units asked for: the sum of the lengths."""
        return sum(request.length for request in self.requests)

    @property
    def num_padded_units(self) -> int:
        """Units computed, padding included."""
        return self.size * self.padded_length

    @property
    def padding_waste(self) -> float:
        """Share of ``num_padded_units`` that is padding, in [0, 1)."""
        return 1.0 - self.num_units / self.num_padded_units
