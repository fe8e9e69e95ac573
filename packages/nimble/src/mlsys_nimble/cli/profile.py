"""Where the time of a replay goes: from when its tasks ran to a table of operators. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Task(Protocol):
    """When one task of a replay ran; :class:`mlsys_nimble.backends.cpu.executor.TaskTime` is one."""

    @property
    def operator(self) -> str:
        """Its operator's name."""
        ...

    @property
    def begin_ns(self) -> int:
        """On a steady clock."""
        ...

    @property
    def end_ns(self) -> int:
        """On the same clock."""
        ...


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator's share of a replay."""

    name: str
    seconds: float  # of all its tasks together, the median of the replays
    num_tasks: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A replay's time, by operator."""

    operators: tuple[OperatorTime, ...]  # the longest first
    elapsed_s: float  # from the first task's begin to the last one's end, the median of the replays

    @property
    def busy_s(self) -> float:
        """Of all workers together."""
        return sum(operator.seconds for operator in self.operators)

    def by_kind(self, kind_of: Mapping[str, str]) -> dict[str, float]:
        """Seconds of each kind of operator, the most first; operators that ``kind_of`` lacks are ``other``."""
        totals: dict[str, float] = {}
        for operator in self.operators:
            kind = kind_of.get(operator.name, "other")
            totals[kind] = totals.get(kind, 0.0) + operator.seconds
        return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


def profile(replays: Iterable[Sequence[Task]]) -> Profile:
    """Medians over replays of the same schedule.

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
