"""Critical path of a measured replay. Pure: task times and dependencies in, a chain of tasks out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


class Task(Protocol):
    """Task of a replay: one operator, or a part of it, on one worker."""

    @property
    def operator(self) -> str:
        """Name of the operator."""

    @property
    def worker(self) -> int:
        """Number of the worker."""

    @property
    def begin_ns(self) -> int:
        """Begin, in nanoseconds."""

    @property
    def end_ns(self) -> int:
        """End, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class Link:
    """Task of the critical path, with the time that nobody worked on it before it began."""

    task: int  # index of the task
    waited_ns: int  # from the end of the task before it in the path (of the replay's begin) to its own begin


def critical_path(tasks: Sequence[Task], needs: Mapping[str, Sequence[str]]) -> list[Link]:
    """Return the chain of tasks that ends last, from the first task on.

    Before each task stands the one that it waited for, which ended last: of the operators that it reads, of its
    worker's tasks before it, of its operator's other parts (one worker may have run both). The tasks' times and waits
    add up to the replay's time.

    Args:
        tasks: Tasks of one replay.
        needs: Names of the operators that each operator reads.

    Example:
        >>> from types import SimpleNamespace as T
        >>> a = T(operator="a", worker=0, begin_ns=0, end_ns=5)
        >>> b = T(operator="b", worker=1, begin_ns=6, end_ns=9)
        >>> critical_path([a, b], {"b": ["a"]})
        [Link(task=0, waited_ns=0), Link(task=1, waited_ns=1)]
    """
    if not tasks:
        return []
    of_operator: dict[str, list[int]] = {}
    of_worker: dict[int, list[int]] = {}
    for index in sorted(range(len(tasks)), key=lambda index: tasks[index].begin_ns):
        of_operator.setdefault(tasks[index].operator, []).append(index)
        of_worker.setdefault(tasks[index].worker, []).append(index)
    before = {index: previous for indices in of_worker.values() for previous, index in pairwise(indices)}
    start = min(task.begin_ns for task in tasks)
    current: int | None = max(range(len(tasks)), key=lambda index: tasks[index].end_ns)
    path: list[Link] = []
    while current is not None:
        begin = tasks[current].begin_ns
        operator = tasks[current].operator
        causes = [each for name in (operator, *needs.get(operator, ())) for each in of_operator.get(name, ())]
        causes += [before[current]] if current in before else []
        causes = [each for each in causes if tasks[each].end_ns <= begin and tasks[each].begin_ns < begin]
        cause = max(causes, key=lambda index: tasks[index].end_ns, default=None)
        path.append(Link(current, begin - (tasks[cause].end_ns if cause is not None else start)))
        current = cause
    return path[::-1]
