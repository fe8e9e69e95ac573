"""Settings of an engine of streams, and the answers that it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_batchmaker.streams.frames import Frame


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer to one frame: a value, or an error after which the stream is closed."""

    frame: Frame
    value: NDArray[Any] | None
    error: Exception | None
    answered_s: float

    @property
    def latency_s(self) -> float:
        """Seconds from the frame's arrival to its answer."""
        return self.answered_s - self.frame.arrived_s


Sink = Callable[[Sequence[Answered]], None]  # gets answers of one batch, in a worker's thread; must not raise


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Settings of an engine of streams."""

    num_workers: int = 2  # each a thread
    num_slots: int = 4096  # states in the pool; those of further streams wait in host memory
    max_streams: int = 65_536
    max_pending: int = 256  # frames that may wait in one stream
    max_batch: int = 96  # frames of a batch: a millisecond or so, after which earlier deadlines get their turn
    idle_timeout_s: float = 60.0  # a stream without frames for so long ends

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise InvalidInputError(f"num_workers={self.num_workers}: at least 1 is needed")
