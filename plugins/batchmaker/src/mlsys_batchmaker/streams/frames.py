"""Plain data of streams: frames, batches of them, moves of states, and what is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mlsys_core.errors import InvalidInputError, ServingError
from numpy.typing import NDArray


class StreamsFullError(ServingError):
    """There are as many streams, or frames that wait in one, as were allowed."""

    http_status = 503


class UnknownStreamError(InvalidInputError):
    """No stream of this id is open: it was never started, has ended, or was idle for too long."""


class MoveKind(Enum):
    """Change of a slot before a batch runs."""

    CLEAR = "clear"  # zeros: the stream begins
    OUT = "out"  # slot to host memory
    IN = "in"  # host memory to slot
    FORGET = "forget"  # the stream has ended while it was in host memory: drop what is kept there; no slot


@dataclass(frozen=True, slots=True)
class Move:
    """One change of a slot; moves are made in their order."""

    kind: MoveKind
    stream: Stream
    slot: int


@dataclass(slots=True, eq=False)
class Frame:
    """One input of a stream."""

    stream: Stream
    number: int  # position in the stream, from 0 on
    values: Any  # the executor's
    arrived_s: float
    deadline_s: float
    is_last: bool = False
    token: Any = None  # the caller's


@dataclass(slots=True, eq=False)
class Stream:
    """Book-keeping of one open stream."""

    stream_id: Hashable
    sink: Any  # the caller's: what gets its answers
    last_s: float  # when something last came or ended
    number: int = 0  # position among the streams opened so far; an id may be used again
    slot: int | None = None
    is_fresh: bool = True  # no frame has run
    is_running: bool = False
    is_gone: bool = False
    num_frames: int = 0  # given so far
    pending: deque[Frame] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """Frames of different streams, to be computed at once."""

    frames: Sequence[Frame]
    slots: Sequence[int]
    moves: Sequence[Move]


@dataclass(slots=True)
class StreamCounters:
    """Totals since the start."""

    frames: int = 0  # answered
    late: int = 0  # frames answered after their deadline
    batches: int = 0
    swapped_out: int = 0
    swapped_in: int = 0

    @property
    def effective_batch_size(self) -> float:
        """Frames of a mean batch."""
        return self.frames / self.batches if self.batches else 0.0


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
