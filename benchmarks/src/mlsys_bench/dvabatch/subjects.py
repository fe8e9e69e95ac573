"""Models that a benchmark serves: costs alone, or a real model whose batches are run and timed; both in virtual time.

A real run in virtual time: each task is executed when it is submitted, and takes as long as it took this thread's
processor. So others on the machine neither lengthen the times nor the arrivals, and one core is what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from mlsys_core.loop.baselines import RequestBatch
from mlsys_dvabatch.executors.runner import StageRunner
from mlsys_dvabatch.scheduling.costs import StageCosts, remaining_s
from mlsys_dvabatch.scheduling.scheduler import simulated_output, task_s
from mlsys_dvabatch.scheduling.tasks import StageOutput, StageTask


class Subject(Protocol):
    """Source of the seconds and outputs of tasks and of whole batches."""

    @property
    def costs(self) -> StageCosts:
        """Costs by which policies decide."""
        ...

    def task_s(self, task: StageTask) -> float:
        """Return the seconds that a task takes."""
        ...

    def task_output(self, task: StageTask) -> StageOutput:
        """Return the task's output; called after :meth:`task_s`."""
        ...

    def whole_s(self, batch: RequestBatch[Any]) -> float:
        """Return the seconds that a batch of whole requests takes."""
        ...

    def whole_output(self, batch: RequestBatch[Any]) -> list[Any]:
        """Return the batch's output; called after :meth:`whole_s`."""
        ...


class Costed:
    """A model of which only the measured costs are used; ``overhead_s`` comes on top of each task and whole batch."""

    def __init__(self, costs: StageCosts, overhead_s: float = 0.0) -> None:
        self.costs = costs
        self._overhead_s = overhead_s

    def task_s(self, task: StageTask) -> float:
        """Return the task's seconds from the table of costs."""
        return task_s(self.costs, task) + self._overhead_s

    def task_output(self, task: StageTask) -> StageOutput:
        """Return an output of None for each request."""
        return simulated_output(task)

    def whole_s(self, batch: RequestBatch[Any]) -> float:
        """Return the batch's seconds from the table of costs."""
        return remaining_s(self.costs, 0, batch.size, batch.padded_length) + self._overhead_s

    def whole_output(self, batch: RequestBatch[Any]) -> list[Any]:
        """Return None for each request."""
        return [None] * batch.size


class Timed:
    """A model that runs. One run at a time.

    Args:
        runner: new for each run.
        costs: what policies decide by.
        clock: seconds of this thread.
    """

    def __init__(self, runner: StageRunner, costs: StageCosts, clock: Callable[[], float] = time.thread_time) -> None:
        self.costs = costs
        self._runner = runner
        self._clock = clock
        self._outputs: dict[int, Any] = {}

    def task_s(self, task: StageTask) -> float:
        """Run the task and return its processor time in seconds."""
        return self._timed(task.number, lambda: self._runner.run(task))

    def task_output(self, task: StageTask) -> StageOutput:
        """Return the output of the task, which :meth:`task_s` has run."""
        output: StageOutput = self._outputs.pop(task.number)
        return output

    def whole_s(self, batch: RequestBatch[Any]) -> float:
        """Run the batch through all stages and return its processor time in seconds."""
        return self._timed(id(batch), lambda: self._runner.run_whole(batch))

    def whole_output(self, batch: RequestBatch[Any]) -> list[Any]:
        """Return the output of the batch, which :meth:`whole_s` has run."""
        output: list[Any] = self._outputs.pop(id(batch))
        return output

    def _timed(self, key: int, run: Callable[[], Any]) -> float:
        start_s = self._clock()
        self._outputs[key] = run()
        return self._clock() - start_s
