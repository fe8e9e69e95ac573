"""The pure scheduler of streams against invariants, over random sequences of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mlsys_batchmaker.streams.frames import MoveKind, Stream, StreamBatch, StreamsFullError, UnknownStreamError
from mlsys_batchmaker.streams.scheduler import StreamScheduler
from mlsys_core.errors import InvalidInputError

NAMES = st.sampled_from("abcdefg")


class StreamsMachine(RuleBasedStateMachine):
    """A model of slots and host memory beside the scheduler; every rule checks it."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = StreamScheduler(num_slots=3, max_batch=2, max_streams=5, max_pending=3)
        self.now = 0.0
        self.in_flight: list[StreamBatch] = []
        self.slots: dict[int, tuple[Stream, int]] = {}  # slot -> whose state, and after how many frames
        self.host: dict[Stream, int] = {}
        self.waiting: dict[Stream, list[int]] = {}  # numbers of frames that were accepted and did not run
        self.done: dict[Stream, int] = {}  # frames that ran, which come in order
        self.open: dict[str, Stream] = {}

    @rule(name=NAMES)
    def begin(self, name: str) -> None:
        if name in self.open:
            with pytest.raises(InvalidInputError):
                self.scheduler.open(name, now=self.now)
        elif len(self.open) == 5:
            with pytest.raises(StreamsFullError):
                self.scheduler.open(name, now=self.now)
        else:
            self.scheduler.open(name, now=self.now)
            stream = self.scheduler._streams[name]
            self.open[name] = stream
            self.waiting[stream], self.done[stream] = [], 0

    @rule(name=NAMES, ahead=st.integers(0, 9), is_last=st.booleans())
    def push(self, name: str, ahead: int, is_last: bool) -> None:
        self.now += 1
        if name not in self.open:
            with pytest.raises(UnknownStreamError):
                self.scheduler.push(name, None, now=self.now)
            return
        stream = self.open[name]
        if len(stream.pending) == 3:
            with pytest.raises(StreamsFullError):
                self.scheduler.push(name, None, now=self.now)
            return
        frame = self.scheduler.push(name, None, now=self.now, deadline_s=self.now + ahead, is_last=is_last)
        self.waiting[stream].append(frame.number)
        if is_last:
            del self.open[name]

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        if name in self.open:
            stream = self.open.pop(name)
            dropped = self.scheduler.close(name)
            assert [frame.number for frame in dropped] == self.waiting[stream]
            self.waiting[stream] = []

    @rule(name=NAMES)
    def end(self, name: str) -> None:
        if name in self.open:
            stream = self.open[name]
            has_work = bool(self.waiting[stream]) or stream.is_running
            assert self.scheduler.end_after_pending(name) == has_work
            if has_work:
                del self.open[name]  # and all that it was given still runs

    @rule()
    def take(self) -> None:
        running = {stream for batch in self.in_flight for stream in (frame.stream for frame in batch.frames)}
        ready = [each for each, numbers in self.waiting.items() if numbers and each not in running]
        deadlines = {each: each.pending[0].deadline_s for each in ready}
        batch = self.scheduler.next_batch()
        if batch is None:
            assert not ready or len(running) == 3  # nothing is left lying while a slot could be had
            self._move(self.scheduler.take_moves())
            return
        chosen = [frame.stream for frame in batch.frames]
        assert len(set(chosen)) == len(chosen) <= 2
        assert not running & set(chosen)  # one frame of a stream at a time
        left = [deadlines[each] for each in ready if each not in chosen]
        if len(chosen) == 2 or len(running) + len(chosen) < 3:
            assert all(deadlines[each] <= min(left, default=1e9) for each in chosen)
        self._move(batch.moves)
        for frame, slot in zip(batch.frames, batch.slots, strict=True):
            assert self.slots[slot] == (frame.stream, self.done[frame.stream])  # its own state, up to date
            assert frame.number == self.waiting[frame.stream].pop(0) == self.done[frame.stream]
        self.in_flight.append(batch)

    def _move(self, moves: object) -> None:
        busy = {slot for batch in self.in_flight for slot in batch.slots}
        for move in moves:  # type: ignore[attr-defined]
            assert move.slot not in busy
            if move.kind is MoveKind.CLEAR:
                assert self.done[move.stream] == 0
                self.slots[move.slot] = (move.stream, 0)
            elif move.kind is MoveKind.OUT:
                owner, frames = self.slots.pop(move.slot)
                assert owner is move.stream
                self.host[owner] = frames
            elif move.kind is MoveKind.IN:
                self.slots[move.slot] = (move.stream, self.host.pop(move.stream))
            else:
                del self.host[move.stream]

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        batch = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.now += 1
        for frame, slot in zip(batch.frames, batch.slots, strict=True):
            self.done[frame.stream] += 1
            self.slots[slot] = (frame.stream, self.done[frame.stream])
        self.scheduler.complete(batch, now=self.now)

    @invariant()
    def nothing_leaks(self) -> None:
        owned = [each.slot for each in self.waiting if each.slot is not None]
        assert len(owned) == len(set(owned))
        assert sorted([*owned, *self.scheduler._free]) == [0, 1, 2]
        assert len(self.scheduler) == len(self.open)

    def teardown(self) -> None:
        while self.in_flight:
            batch = self.in_flight.pop()
            for frame in batch.frames:
                self.done[frame.stream] += 1
            for frame, slot in zip(batch.frames, batch.slots, strict=True):
                self.slots[slot] = (frame.stream, self.done[frame.stream])
            self.scheduler.complete(batch, now=self.now)
        for _ in range(1000):
            if not any(self.waiting.values()):
                break
            self.take()
            if self.in_flight:
                batch = self.in_flight.pop()
                for frame, slot in zip(batch.frames, batch.slots, strict=True):
                    self.done[frame.stream] += 1
                    self.slots[slot] = (frame.stream, self.done[frame.stream])
                self.scheduler.complete(batch, now=self.now)
        assert not any(self.waiting.values())  # all that was accepted and not closed has run
        for name in list(self.open):
            self.close(name)
        self._move(self.scheduler.take_moves())
        assert sorted(self.scheduler._free) == [0, 1, 2]
        assert not self.host


StreamsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestStreams = StreamsMachine.TestCase


def test_the_earliest_deadline_goes_first_and_takes_the_slot_of_a_later_one() -> None:
    scheduler = StreamScheduler(num_slots=1, max_batch=4)
    for name in "ab":
        scheduler.open(name, now=0.0)
    scheduler.push("a", None, now=0.0, deadline_s=5.0)
    first = scheduler.next_batch()
    assert first is not None
    scheduler.push("a", None, now=1.0, deadline_s=9.0)
    scheduler.push("b", None, now=1.0, deadline_s=6.0)
    assert scheduler.next_batch() is None  # the one slot is of a running stream
    scheduler.complete(first, now=2.0)
    second = scheduler.next_batch()
    assert second is not None
    assert [frame.stream.stream_id for frame in second.frames] == ["b"]
    assert [move.kind for move in second.moves] == [MoveKind.OUT, MoveKind.CLEAR]
    scheduler.complete(second, now=7.0)
    assert scheduler.counters.late == 1
    third = scheduler.next_batch()
    assert third is not None
    assert [move.kind for move in third.moves] == [MoveKind.OUT, MoveKind.IN]


def test_idle_streams_are_those_without_frames() -> None:
    scheduler = StreamScheduler(num_slots=2)
    scheduler.open("busy", now=0.0)
    scheduler.open("idle", now=0.0)
    scheduler.push("busy", None, now=0.0)
    assert scheduler.idle_since(1.0) == ["idle"]
    with pytest.raises(InvalidInputError, match="num_slots=0"):
        StreamScheduler(num_slots=0)
