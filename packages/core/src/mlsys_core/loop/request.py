"""The plain request of request-level serving: the queue orders it and the baselines batch it.

Iteration-, cell- and stage-level schedulers have richer requests of their own; the loop does not look inside any.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from mlsys_core.errors import InvalidInputError

Payload = TypeVar("Payload")
PayloadOut = TypeVar("PayloadOut", covariant=True)


@dataclass(frozen=True, slots=True)
class ServeRequest(Generic[PayloadOut]):
    """One request, as its client sent it.

    Raises:
        InvalidInputError: the id is empty, ``length`` is below 1, or a time is not finite.

    Example:
        >>> ServeRequest("a", "I think this", length=3, deadline_s=0.2).priority
        0
    """

    request_id: str  # unique among the unfinished requests of a loop
    payload: PayloadOut  # input of the executor; opaque to the scheduler
    length: int = 1  # size in the model's own units (tokens, rows, steps); what padding is about
    arrival_s: float = 0.0  # when it came, seconds of the loop's clock
    priority: int = 0  # smaller goes first, any sign; equals go in order of admission
    deadline_s: float | None = None  # done later than this it is of no use; seconds of the loop's clock

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InvalidInputError("a request needs a request_id that is not empty")
        if self.length < 1:
            raise InvalidInputError(f"request {self.request_id!r} has length {self.length}: at least 1 is needed")
        if not math.isfinite(self.arrival_s):
            raise InvalidInputError(f"request {self.request_id!r} has arrival_s={self.arrival_s}: it must be finite")
        if self.deadline_s is not None and not math.isfinite(self.deadline_s):
            raise InvalidInputError(
                f"request {self.request_id!r} has deadline_s={self.deadline_s}: give a finite time, or None for none"
            )
