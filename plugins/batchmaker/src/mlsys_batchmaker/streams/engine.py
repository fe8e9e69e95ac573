"""The engine of streams: worker threads that take batches from a :class:`StreamScheduler` and compute them.

push (any thread) -> scheduler -> worker -> stepper -> the sink of each stream (worker's thread). A frame costs a few
microseconds around its cell, which is why it does not pass core's serving loop (ADR 30).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import numpy as np
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.loop import Clock, WallClock
from mlsys_serving.isolation import NotFiniteError
from mlsys_serving.watch import BatchSource
from numpy.typing import NDArray

from mlsys_batchmaker.plan.spec import Port
from mlsys_batchmaker.streams.frames import (
    Answered,
    Frame,
    Move,
    MoveKind,
    Sink,
    Stream,
    StreamBatch,
    StreamConfig,
    StreamCounters,
)
from mlsys_batchmaker.streams.model import Stepper, StreamModel
from mlsys_batchmaker.streams.scheduler import StreamScheduler


class StreamEngine:
    """Live streams of one model; close it, or use it as a context manager.

    Args:
        model: what computes a frame.
        config: settings.
        clock: of deadlines.
        on_batch: called with each batch's size and seconds, in a worker's thread.

    Example:
        >>> from mlsys_batchmaker.cells.cell import make_cell
        >>> from mlsys_batchmaker.cells.lstm import StackedLSTMCell
        >>> from mlsys_batchmaker.streams.model import stream_of
        >>> cell = make_cell("frame", StackedLSTMCell(8, 16, 1))
        >>> stream = stream_of(cell, states={"h0": "h0", "c0": "c0"}, answer="h0")
        >>> with StreamEngine(stream) as engine:
        ...     engine.run(np.zeros((3, 8), dtype=np.float32)).shape
        (3, 16)
    """

    def __init__(
        self,
        model: StreamModel,
        config: StreamConfig | None = None,
        *,
        clock: Clock | None = None,
        on_batch: Callable[[int, float], None] | None = None,
    ) -> None:
        self.model = model
        self.config = config = config or StreamConfig()
        spec = model.spec
        self.score_source = BatchSource(label_of=lambda _: spec.name)
        self.scheduler = StreamScheduler(
            num_slots=config.num_slots,
            max_batch=config.max_batch,
            max_streams=config.max_streams,
            max_pending=config.max_pending,
            frame_s=spec.frame_s,
            on_end=lambda stream: self.score_source.closed(stream.number, "done"),
        )
        self._states = StatePool(config.num_slots, spec.states)  # moved under the lock
        self._on_batch = on_batch
        self._now = (clock or WallClock()).now
        self._changed = threading.Condition()
        self._num_idle = 0
        self._is_closing = False
        self._dtype, self._shape = np.dtype(spec.frame.dtype), spec.frame.shape
        self._high = spec.frame.high
        self._threads = [
            threading.Thread(target=self._work, args=(model.stepper(self._states.arrays),), name=f"streams-{number}")
            for number in range(config.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> StreamCounters:
        """Totals since the start."""
        return self.scheduler.counters

    def __len__(self) -> int:
        return len(self.scheduler)

    def __contains__(self, stream_id: Hashable) -> bool:
        return stream_id in self.scheduler

    def open(self, stream_id: Hashable, sink: Sink) -> None:
        """Begin a stream. Raises as :meth:`StreamScheduler.open`; streams idle for too long end first."""
        with self._changed:
            self._require_open()
            now = self._now()
            if len(self.scheduler) >= self.config.max_streams:
                self.end_idle()
            self.score_source.opened(self.scheduler.open(stream_id, now=now, sink=sink).number)

    def push(
        self,
        stream_id: Hashable,
        values: NDArray[Any],
        *,
        deadline_s: float | None = None,
        is_last: bool = False,
        token: Any = None,
    ) -> Frame:
        """Give a stream its next frame; its sink gets the answer. Raises as :meth:`StreamScheduler.push`.

        Args:
            stream_id: of an open stream.
            values: the frame, not changed until it is answered.
            deadline_s: the engine's clock; None: one frame's time from now.
            is_last: the stream ends after it.
            token: kept with the frame, for the sink.

        Raises:
            InvalidInputError: the frame's dtype or shape is another.
        """
        return self.push_many(stream_id, values[None], deadline_s=deadline_s, is_last=is_last, token=token)[-1]

    def push_many(
        self,
        stream_id: Hashable,
        frames: NDArray[Any],
        *,
        deadline_s: float | None = None,
        is_last: bool = False,
        token: Any = None,
    ) -> list[Frame]:
        """Give a stream several frames, all or none of them; otherwise as :meth:`push`.

        Args:
            stream_id: of an open stream.
            frames: [n, *frame's shape].
            deadline_s: of each.
            is_last: the stream ends after the last of them.
            token: kept with each.
        """
        if frames.dtype != self._dtype or frames.shape[1:] != self._shape:
            raise InvalidInputError(
                f"a frame of {self.model.spec.name!r} is {self._dtype}{list(self._shape)}, "
                f"got {frames.dtype}{list(frames.shape[1:])}"
            )
        if self._high is not None and not (frames.min() >= 0 and frames.max() < self._high):
            wrong = frames.min() if frames.min() < 0 else frames.max()
            raise InvalidInputError(f"a frame of {self.model.spec.name!r}: {wrong} lies outside [0, {self._high})")
        last = len(frames) - 1
        with self._changed:
            self._require_open()
            now = self._now()
            self.scheduler.require_room(stream_id, len(frames))
            pushed = [
                self.scheduler.push(
                    stream_id,
                    values,
                    now=now,
                    deadline_s=deadline_s,
                    is_last=is_last and number == last,
                    token=token,
                )
                for number, values in enumerate(frames)
            ]
            if self._num_idle:
                self._changed.notify()
        return pushed

    def close_stream(self, stream_id: Hashable, *, after_pending: bool = False) -> list[Frame]:
        """End a stream: at once, and return its frames that are then not answered, or after those that wait."""
        with self._changed:
            if after_pending and self.scheduler.end_after_pending(stream_id):
                return []
            return self.scheduler.close(stream_id)

    def run(self, frames: NDArray[Any]) -> NDArray[Any]:
        """Run a whole recording as one stream, and return an answer for each frame."""
        found: list[Answered] = []
        done = threading.Event()

        def sink(answers: Sequence[Answered]) -> None:
            found.extend(answers)
            if any(each.error is not None or each.frame.is_last for each in answers):
                done.set()

        answers: list[NDArray[Any]] = []
        name = object()
        step = self.config.max_pending
        for start in range(0, len(frames), step):
            if start == 0:
                self.open(name, sink)
            part = frames[start : start + step]
            self.push_many(name, part, is_last=start + step >= len(frames))
            self._wait_for(found, start + len(part), done)
        for each in found:
            if each.error is not None or each.value is None:
                raise each.error or ServingError("the engine was closed")
            answers.append(each.value)
        port = self.model.spec.answer
        return np.stack(answers) if answers else np.empty((0, *port.shape), dtype=port.dtype)

    def close(self) -> None:
        """Stop the workers; frames that wait are not answered. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def end_idle(self) -> int:
        """End the streams that had no frame for ``idle_timeout_s``; return how many."""
        with self._changed:
            idle = self.scheduler.idle_since(self._now() - self.config.idle_timeout_s)
            for stream_id in idle:
                self.scheduler.close(stream_id)
            self._states.make(self.scheduler.take_moves())
            return len(idle)

    def _wait_for(self, found: list[Answered], count: int, done: threading.Event) -> None:
        while len(found) < count and not done.wait(0.001):
            if self._is_closing:
                raise ServingError("the engine was closed")

    def _require_open(self) -> None:
        if self._is_closing:
            raise ServingError("the engine is closing: it takes no more frames")

    def _work(self, stepper: Stepper) -> None:
        while (batch := self._take()) is not None:
            frames = np.stack([frame.values for frame in batch.frames])
            error: Exception | None = None
            started_s = self._now()
            try:
                values, failures = stepper.step(np.array(batch.slots, dtype=np.int64), frames)
            except Exception as cause:  # noqa: BLE001 - a request boundary: these streams fail, others go on
                values, failures, error = np.empty(len(frames)), {}, cause
            ended_s = self._now()
            if self._on_batch is not None:
                self._on_batch(len(frames), ended_s - started_s)
            self.score_source.ran(batch, [frame.stream.number for frame in batch.frames], started_s, ended_s)
            self._deliver(batch, values, failures, error)

    def _take(self) -> StreamBatch | None:
        with self._changed:
            while not self._is_closing:
                batch = self.scheduler.next_batch()
                if batch is not None:
                    self._states.make(batch.moves)
                    if self._num_idle and self.scheduler.has_ready:
                        self._changed.notify()
                    return batch
                self._num_idle += 1
                is_told = self._changed.wait(1.0)
                self._num_idle -= 1
                if not is_told:
                    self.end_idle()
            return None

    def _deliver(self, batch: StreamBatch, values: NDArray[Any], failures: Any, error: Exception | None) -> None:
        now = self._now()
        failures = dict.fromkeys(range(len(batch.frames)), error) if error is not None else dict(failures)
        if error is None and values.dtype.kind == "f" and not np.isfinite(values).all():
            for row in range(len(values)):
                if not np.isfinite(values[row]).all():
                    failures.setdefault(row, NotFiniteError("the answer", "the stream is closed"))
        by_sink: dict[Sink, list[Answered]] = {}
        if failures:
            with self._changed:
                for row, cause in failures.items():
                    stream = batch.frames[row].stream
                    for dropped in self.scheduler.abandon(stream):
                        by_sink.setdefault(stream.sink, []).append(Answered(dropped, None, cause, now))
        for row, frame in enumerate(batch.frames):
            cause = failures.get(row) if failures else None
            by_sink.setdefault(frame.stream.sink, []).append(
                Answered(frame, None if cause else values[row], cause, now)
            )
        for sink, answers in by_sink.items():
            sink(answers)
        with self._changed:  # after the sinks, so that each stream's answers come in order
            self.scheduler.complete(batch, now=now)
            if self._num_idle and self.scheduler.has_ready:
                self._changed.notify()


class StatePool:
    """States of all streams; one thread at a time moves them.

    Args:
        num_slots: streams whose states are in the pool.
        ports: the states of a stream.
    """

    def __init__(self, num_slots: int, ports: Sequence[Port]) -> None:
        self.arrays = [np.zeros((num_slots, *port.shape), dtype=port.dtype) for port in ports]  # [slot, *shape]
        self._host: dict[Stream, list[NDArray[Any]]] = {}  # states that are swapped out

    def make(self, moves: Sequence[Move]) -> None:
        """Move states in order; no batch that needs them has begun."""
        for move in moves:
            if move.kind is MoveKind.CLEAR:
                for state in self.arrays:
                    state[move.slot] = 0
            elif move.kind is MoveKind.OUT:
                self._host[move.stream] = [state[move.slot].copy() for state in self.arrays]
            elif move.kind is MoveKind.IN:
                for state, kept in zip(self.arrays, self._host.pop(move.stream), strict=True):
                    state[move.slot] = kept
            else:
                self._host.pop(move.stream, None)
