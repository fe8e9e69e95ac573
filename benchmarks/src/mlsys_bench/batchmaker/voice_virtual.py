"""Live voices in virtual time: batches are computed for real, and a clock moves by their CPU time.

As the other figures of BatchMaker, so that a busy machine changes the results little. Workers compute side by side;
what is Python around their steps (pushing, choosing, stacking, completing) is done by one of them at a time, as under
the interpreter's lock. What is Python inside a step counts as computing, which favours the cases that have more of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from time import thread_time
from typing import Any

import numpy as np
from mlsys_batchmaker.streams.frames import MoveKind, StreamBatch, StreamsFullError
from mlsys_batchmaker.streams.model import Stepper, StreamModel
from mlsys_batchmaker.streams.scheduler import StreamScheduler
from numpy.typing import NDArray

Voices = Sequence[NDArray[np.float32]]


class VirtualStreams:
    """Engine of streams in virtual time.

    Args:
        model: what computes a frame.
        num_streams: all have a slot.
        workers: that compute side by side.
        max_batch: frames of a batch.
    """

    def __init__(self, model: StreamModel, num_streams: int, *, workers: int, max_batch: int) -> None:
        self._states = [np.zeros((num_streams, *port.shape), dtype=port.dtype) for port in model.spec.states]
        self._stepper: Stepper = model.stepper(self._states)
        self._frame_s = model.spec.frame_s
        self._scheduler = StreamScheduler(num_slots=num_streams, max_batch=max_batch, max_pending=32)
        self._num_idle = workers
        self._locked_until_s = 0.0  # the interpreter
        self._running: list[tuple[float, int, StreamBatch]] = []  # a heap; by their end
        self._num_batches = 0
        self.latencies_s: list[float] = []
        for number in range(num_streams):
            self._scheduler.open(number, now=0.0)

    def peak(self, voices: Voices, num_frames: int) -> float:
        """Return frames a second where all frames wait from the beginning on."""
        num_streams = len(self._scheduler)
        for step in range(num_frames):
            for number in range(num_streams):
                self._push(number, voices[number % len(voices)][step], 0.0)
        return num_streams * num_frames / self._run_until(None)

    def live(self, voices: Voices, seconds: float) -> dict[str, Any]:
        """Let every stream speak at its own phase; return latencies from when a frame is there."""
        num_streams = len(self._scheduler)
        rng = np.random.default_rng(num_streams)
        phases = np.sort(rng.uniform(0, self._frame_s, num_streams))
        num_steps = int(seconds / self._frame_s)
        is_lost = False
        end_s = 0.0
        try:
            for step in range(num_steps):
                for number, phase in enumerate(phases):
                    due_s = step * self._frame_s + float(phase)
                    self._run_until(due_s)
                    voice = voices[number % len(voices)]
                    self._push(number, voice[(step + number) % len(voice)], due_s)
                    self._start(due_s)
            end_s = self._run_until(None)
        except StreamsFullError:  # a second of frames waits
            is_lost = True
        kept = self.latencies_s[len(self.latencies_s) // 10 :] or [end_s]
        p50, p90, p99 = (float(each) for each in np.percentile(kept, (50, 90, 99)))
        size = len(self.latencies_s) / max(1, self._num_batches)
        return {"streams": num_streams, "p50_s": p50, "p90_s": p90, "p99_s": p99, "batch": size, "is_lost": is_lost}

    def _push(self, number: int, frame: NDArray[np.float32], now: float) -> None:
        started_s = thread_time()
        self._scheduler.push(number, frame, now=now, deadline_s=now + self._frame_s)
        self._lock(now, thread_time() - started_s)

    def _lock(self, now: float, seconds: float) -> float:
        """Hold the interpreter for so long, once it is free; return when it is free again."""
        self._locked_until_s = max(self._locked_until_s, now) + seconds
        return self._locked_until_s

    def _run_until(self, until_s: float | None) -> float:
        """Start and end batches up to then, or till nothing is left; return when the last ended."""
        now = 0.0
        while True:
            self._start(now)
            if not self._running or (until_s is not None and self._running[0][0] > until_s):
                return now
            now, _, batch = heapq.heappop(self._running)
            started_s = thread_time()
            self._scheduler.complete(batch, now=now)
            self._lock(now, thread_time() - started_s)
            self._num_idle += 1
            self.latencies_s += [now - frame.arrived_s for frame in batch.frames]

    def _start(self, now: float) -> None:
        while self._num_idle:
            started_s = thread_time()
            batch = self._scheduler.next_batch()
            if batch is None:
                return
            for move in batch.moves:
                assert move.kind is MoveKind.CLEAR
            frames = np.stack([frame.values for frame in batch.frames])
            slots = np.array(batch.slots, dtype=np.int64)
            chosen_s = thread_time()
            self._stepper.step(slots, frames)
            ended_s = thread_time()
            now = max(now, max(frame.arrived_s for frame in batch.frames))
            end_s = self._lock(now, chosen_s - started_s) + ended_s - chosen_s
            self._num_idle -= 1
            self._num_batches += 1
            heapq.heappush(self._running, (end_s, self._num_batches, batch))
