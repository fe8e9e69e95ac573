"""Data between the scheduler and the executors: one part of a batch in one stage, or in several in one go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlsys_core.loop.queue import ServeRequest

from mlsys_dvabatch.scheduling.table import Part


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of what an earlier task has left."""

    task: int  # number of that task
    rows: tuple[int, ...]  # positions in its output


@dataclass(frozen=True, slots=True)
class StageTask:
    """Unit of work of an executor. Its output is a :class:`StageOutput`."""

    number: int  # counts from 0; names what the task leaves behind
    stage: int  # first stage; its executor runs the task
    last_stage: int  # last stage; equal to stage unless several run in one go
    part: Part  # requests, as the batch queue had them
    requests: tuple[ServeRequest[Any], ...]
    padded_length: int  # units to which each is padded
    pair: int  # the buffer pair it uses
    sources: tuple[Source, ...]  # its inputs' places, in the order of the requests; () for the first stage
    skips: frozenset[int] = frozenset()  # positions of requests that skip this stage
    drops: tuple[int, ...] = ()  # tasks with outputs that nobody reads any more
    is_last: bool = False

    @property
    def num(self) -> int:
        """Number of requests in it."""
        return len(self.requests)

    @property
    def gathers(self) -> bool:
        """True if rows have to be copied together: its inputs are not simply what one task left."""
        return len(self.sources) > 1 or (bool(self.sources) and self.sources[0].rows != tuple(range(self.num)))


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Result of a task."""

    results: Sequence[Any] = ()  # last stage: one for each request; an exception fails its request alone
    exits: Mapping[int, Any] = field(default_factory=dict)  # position -> result of a request that leaves early
    skip_to: Mapping[int, int] = field(default_factory=dict)  # position -> the next stage it has to run


class HeldRows:
    """Activations between stages: rows of tasks' outputs that requests still need, and outputs that nobody needs."""

    def __init__(self) -> None:
        self.rows_of_task: Counter[int] = Counter()  # task -> rows of its output that are still needed
        self._row_of: dict[str, tuple[int, int]] = {}  # request -> (task, row) that holds its activations
        self._drops: list[int] = []

    def move(self, request_id: str, task: int | None, row: int) -> None:
        """Note that a request's activations are in ``task`` now; drop the earlier ones when nobody needs them."""
        before = self._row_of.pop(request_id, None)
        if task is not None:
            self._row_of[request_id] = task, row
            self.rows_of_task[task] += 1
        if before is not None:
            self.rows_of_task[before[0]] -= 1
            if not self.rows_of_task[before[0]]:
                del self.rows_of_task[before[0]]
                self._drops.append(before[0])

    def sources(self, requests: Sequence[str]) -> tuple[Source, ...]:
        """Return where the activations of ``requests`` are, in their order."""
        sources: list[tuple[int, list[int]]] = []
        for request in requests:
            task, row = self._row_of[request]
            if not sources or sources[-1][0] != task:
                sources.append((task, []))
            sources[-1][1].append(row)
        return tuple(Source(task, tuple(rows)) for task, rows in sources)

    def take_drops(self) -> tuple[int, ...]:
        """Return the tasks whose output nobody needs since the last call."""
        drops, self._drops = tuple(self._drops), []
        return drops
