"""Activations between stages, by the task that left them: who needs which rows, and which nobody needs any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mlsys_dvabatch.scheduling.tasks import Source


class HeldRows:
    """Rows of tasks' outputs that requests still need."""

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
