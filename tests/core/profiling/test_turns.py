"""Turns on a clock of the test's own."""

from __future__ import annotations

import pytest
from mlsys_core.profiling.turns import take_turns


class Time:
    """A clock that only calls and sleeps move."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.log.append("idle")
        self.now += seconds

    def takes(self, name: str, seconds: float):
        def call() -> None:
            self.log.append(name)
            self.now += seconds

        return call


def test_samples_are_the_calls_durations_and_turns_alternate():
    time = Time()
    calls = {"a": time.takes("a", 0.05), "b": time.takes("b", 0.01)}
    turns = take_turns(calls, turn_s=0.1, clock=time.clock, sleep=time.sleep)
    assert turns["a"] == [pytest.approx([0.05] * 3)] * 2  # two rounds, three calls each
    assert all(len(turn) in (10, 11) and turn == pytest.approx([0.01] * len(turn)) for turn in turns["b"])
    order = [name for name, before in zip(time.log[1:], time.log, strict=False) if before == "idle"]
    assert order == ["a", "b", "b", "a"]


def test_the_first_call_of_a_turn_is_not_timed():
    time = Time()
    durations = iter([9.0] + [1.0] * 3 + [9.0] + [1.0] * 3)

    def call() -> None:
        time.now += next(durations)

    turns = take_turns({"a": call}, turn_s=0.5, clock=time.clock, sleep=time.sleep)
    assert turns["a"] == [[1.0] * 3] * 2


def test_the_budget_bounds_the_rounds():
    time = Time()
    take_turns({"a": time.takes("a", 1.0)}, budget_s=20, turn_s=0, clock=time.clock, sleep=time.sleep)
    assert 20 < time.now < 26  # a round is four seconds and an idle while
