"""Profile of a replay: from the times of its tasks to a table of operators. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Task(Protocol):
    """Times of one task of a replay, such as :class:`mlsys_nimble.backends.cpu.decisions.TaskTime`."""

    @property
    def operator(self) -> str:
        """Return the name of its operator."""
        ...

    @property
    def begin_ns(self) -> int:
        """Return the begin on a steady clock, in nanoseconds."""
        ...

    @property
    def end_ns(self) -> int:
        """Return the end on the same clock."""
        ...


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Time of one operator in a replay."""

    name: str
    seconds: float  # sum of all its tasks, median over replays
    num_tasks: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Time of a replay, by operator."""

    operators: tuple[OperatorTime, ...]  # longest first
    elapsed_s: float  # from the first task's begin to the last one's end, median over replays

    @property
    def busy_s(self) -> float:
        """Return the busy seconds of all workers together."""
        return sum(operator.seconds for operator in self.operators)

    def by_kind(self, kind_of: Mapping[str, str]) -> dict[str, float]:
        """Return the seconds of each kind of operator, longest first; those that ``kind_of`` lacks are ``other``."""
        totals: dict[str, float] = {}
        for operator in self.operators:
            kind = kind_of.get(operator.name, "other")
            totals[kind] = totals.get(kind, 0.0) + operator.seconds
        return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


def profile(replays: Iterable[Sequence[Task]]) -> Profile:
    """Return medians over replays of the same schedule.

    Raises:
        ValueError: there is no replay.

    Example:
        >>> from types import SimpleNamespace as Ran
        >>> replay = [Ran(operator="conv", begin_ns=0, end_ns=3000), Ran(operator="add", begin_ns=3000, end_ns=4000)]
        >>> [one.name for one in profile([replay]).operators]
        ['conv', 'add']
    """
    spent: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    elapsed: list[int] = []
    for tasks in replays:
        own: dict[str, list[int]] = {}
        for task in tasks:
            own.setdefault(task.operator, []).append(task.end_ns - task.begin_ns)
        for name, durations in own.items():
            spent.setdefault(name, []).append(sum(durations))
            counts[name] = len(durations)
        elapsed.append(
            max((task.end_ns for task in tasks), default=0) - min((task.begin_ns for task in tasks), default=0)
        )
    if not elapsed:
        raise ValueError("no replay to profile")
    operators = [OperatorTime(name, statistics.median(times) / 1e9, counts[name]) for name, times in spent.items()]
    operators.sort(key=lambda operator: -operator.seconds)
    return Profile(tuple(operators), statistics.median(elapsed) / 1e9)
