"""Choice of the frames that run next, and of the places of their streams' states. Pure: ``now`` is passed in.

A stream is a recurrent request without an end: one cell a frame, in order. Among the streams that have a frame and none
in flight, those with the earliest deadlines form the next batch. A stream's state has a slot of the pool; where there
are more streams than slots, the state of one that rests is moved to host memory and back when its next frame runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_batchmaker.streams.frames import (
    Frame,
    Move,
    MoveKind,
    Stream,
    StreamBatch,
    StreamCounters,
    StreamsFullError,
    UnknownStreamError,
)


class StreamScheduler:
    """Earliest deadline first among streams, with states in a pool of slots.

    Args:
        num_slots: states that the pool holds.
        max_batch: frames of a batch.
        max_streams: open at a time.
        max_pending: frames that may wait in one stream.
        frame_s: from a frame's arrival to its deadline, where none is given.
        on_end: called with each stream that has ended, its running frame included.

    Example:
        >>> scheduler = StreamScheduler(num_slots=2, max_batch=2)
        >>> for name in "abc":
        ...     _ = scheduler.open(name, now=0.0)
        >>> for name, deadline in zip("abc", (3.0, 1.0, 2.0)):
        ...     _ = scheduler.push(name, None, now=0.0, deadline_s=deadline)
        >>> [frame.stream.stream_id for frame in scheduler.next_batch().frames]
        ['b', 'c']
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_batch: int = 96,
        max_streams: int = 65_536,
        max_pending: int = 256,
        frame_s: float = 0.032,
        on_end: Callable[[Stream], None] | None = None,
    ) -> None:
        for name, value in {"num_slots": num_slots, "max_batch": max_batch, "max_streams": max_streams}.items():
            if value < 1:
                raise InvalidInputError(f"{name}={value}: at least 1 is needed")
        self.max_batch, self.max_streams, self.max_pending, self.frame_s = max_batch, max_streams, max_pending, frame_s
        self.counters, self._on_end = StreamCounters(), on_end
        self._streams: dict[Hashable, Stream] = {}
        self._free = list(range(num_slots))[::-1]
        self._ready: list[tuple[float, int, Stream]] = []  # a heap; by head's deadline, then by arrival
        self._resident: OrderedDict[Stream, None] = OrderedDict()  # not running; least recently used first
        self._moves: list[Move] = []  # for the next batch
        self._numbers = itertools.count()
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: Hashable) -> bool:
        return stream_id in self._streams

    @property
    def has_ready(self) -> bool:
        """True if a frame may be able to run now."""
        return bool(self._ready)

    def open(self, stream_id: Hashable, *, now: float, sink: Any = None) -> Stream:
        """Begin a stream and return it; its state is zeros.

        Raises:
            InvalidInputError: its id is in use.
            StreamsFullError: there are ``max_streams``.
        """
        if stream_id in self._streams:
            raise InvalidInputError(f"stream {stream_id!r} is open already: end it first, or choose another id")
        if len(self._streams) >= self.max_streams:
            raise StreamsFullError(f"{self.max_streams} streams are open, which is the limit (max_streams)")
        self._num_opened += 1
        stream = self._streams[stream_id] = Stream(stream_id, sink, now, self._num_opened)
        return stream

    def push(
        self,
        stream_id: Hashable,
        values: Any,
        *,
        now: float,
        deadline_s: float | None = None,
        is_last: bool = False,
        token: Any = None,
    ) -> Frame:
        """Take a stream's next frame; with ``is_last`` the stream ends after its answer.

        Raises:
            UnknownStreamError: no stream of this id is open.
            StreamsFullError: ``max_pending`` of its frames wait.
        """
        stream = self._stream(stream_id)
        if len(stream.pending) >= self.max_pending:
            raise StreamsFullError(f"{self.max_pending} frames wait in stream {stream_id!r} (max_pending): send slower")
        deadline_s = now + self.frame_s if deadline_s is None else deadline_s
        frame = Frame(stream, stream.num_frames, values, now, deadline_s, is_last, token)
        stream.num_frames += 1
        stream.last_s = now
        stream.pending.append(frame)
        if is_last:
            del self._streams[stream_id]  # the id may be used again; the stream itself goes after its last answer
        if len(stream.pending) == 1 and not stream.is_running:
            self._offer(stream)
        return frame

    def require_room(self, stream_id: Hashable, count: int) -> None:
        """Raise as :meth:`push` does unless the stream takes ``count`` more frames."""
        if len(self._stream(stream_id).pending) + count > self.max_pending:
            raise StreamsFullError(
                f"stream {stream_id!r} takes {self.max_pending} frames that wait (max_pending), and {count} more are "
                "too many: wait for answers"
            )

    def end_after_pending(self, stream_id: Hashable) -> bool:
        """End a stream after its frames that wait or run; return False where there are none, so that it is closed."""
        stream = self._stream(stream_id)
        if stream.pending:
            stream.pending[-1].is_last = True
        elif not stream.is_running:
            return False
        else:
            stream.is_gone = True
        del self._streams[stream_id]
        return True

    def close(self, stream_id: Hashable) -> list[Frame]:
        """End a stream at once; return its frames that wait and now never run.

        Raises:
            UnknownStreamError: no stream of this id is open.
        """
        return self.abandon(self._stream(stream_id))

    def abandon(self, stream: Stream) -> list[Frame]:
        """End a stream at once, also one that waits for its last answer; return its frames that now never run."""
        if self._streams.get(stream.stream_id) is stream:
            del self._streams[stream.stream_id]
        dropped = list(stream.pending)
        stream.pending.clear()
        if not stream.is_gone and not stream.is_running:
            self._release(stream)
        stream.is_gone = True
        return dropped

    def idle_since(self, before_s: float) -> list[Hashable]:
        """Return the open streams that have nothing to do, and had nothing since ``before_s``."""
        return [
            each.stream_id
            for each in self._streams.values()
            if each.last_s <= before_s and not each.pending and not each.is_running
        ]

    def next_batch(self) -> StreamBatch | None:
        """Return the frames with the earliest deadlines, one a stream, or None; make its moves, then compute it.

        A stream that finds no slot, since all are of running streams, is passed over.
        """
        frames: list[Frame] = []
        slots: list[int] = []
        aside: list[tuple[float, int, Stream]] = []
        while self._ready and len(frames) < self.max_batch:
            entry = heapq.heappop(self._ready)
            stream = entry[2]
            if stream.is_gone:
                continue
            if stream.slot is None and not self._give_slot(stream, entry[0]):
                aside.append(entry)
                continue
            assert stream.slot is not None
            self._resident.pop(stream, None)
            stream.is_running = True
            frames.append(stream.pending.popleft())
            slots.append(stream.slot)
        for entry in aside:
            heapq.heappush(self._ready, entry)
        if not frames:
            return None
        self.counters.batches += 1
        moves, self._moves = self._moves, []
        return StreamBatch(frames, slots, moves)

    def complete(self, batch: StreamBatch, *, now: float) -> None:
        """Note that a batch is computed; its streams may run their next frames, and those that have ended leave."""
        self.counters.frames += len(batch.frames)
        for frame in batch.frames:
            stream = frame.stream
            stream.is_running = stream.is_fresh = False
            stream.last_s = now
            if frame.deadline_s < now:
                self.counters.late += 1
            if frame.is_last or stream.is_gone:
                stream.is_gone = True
                self._release(stream)
                continue
            self._resident[stream] = None
            if stream.pending:
                self._offer(stream)

    def take_moves(self) -> list[Move]:
        """Return the moves that no batch took yet, such as what is to be forgotten."""
        moves, self._moves = self._moves, []
        return moves

    def _stream(self, stream_id: Hashable) -> Stream:
        try:
            return self._streams[stream_id]
        except KeyError:
            raise UnknownStreamError(
                f"no stream {stream_id!r} is open: the first frame of a stream starts it, and an idle one ends"
            ) from None

    def _offer(self, stream: Stream) -> None:
        heapq.heappush(self._ready, (stream.pending[0].deadline_s, next(self._numbers), stream))

    def _give_slot(self, stream: Stream, deadline_s: float) -> bool:
        """Give ``stream`` a slot: a free one, else that of a resting stream, else of one whose deadline is later."""
        if self._free:
            slot = self._free.pop()
        else:
            victim = next((each for each in self._resident if not each.pending), None)
            if victim is None:
                victim = max(self._resident, key=lambda each: each.pending[0].deadline_s, default=None)
                if victim is None or victim.pending[0].deadline_s <= deadline_s:
                    return False
            assert victim.slot is not None
            slot, victim.slot = victim.slot, None
            del self._resident[victim]
            self._moves.append(Move(MoveKind.OUT, victim, slot))
            self.counters.swapped_out += 1
        self._moves.append(Move(MoveKind.CLEAR if stream.is_fresh else MoveKind.IN, stream, slot))
        self.counters.swapped_in += not stream.is_fresh
        stream.slot = slot
        return True

    def _release(self, stream: Stream) -> None:
        """Take a stream's slot; each stream comes here once."""
        if self._on_end is not None:
            self._on_end(stream)
        self._resident.pop(stream, None)
        if stream.slot is not None:
            self._free.append(stream.slot)
            stream.slot = None
        elif not stream.is_fresh:
            self._moves.append(Move(MoveKind.FORGET, stream, -1))
