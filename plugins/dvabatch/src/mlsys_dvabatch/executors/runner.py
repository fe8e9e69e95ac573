"""Run tasks on tensors: fetch earlier tasks' outputs, run the stage, keep its output. Below the executors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mlsys_core.errors import ServingError
from mlsys_core.loop.baselines import RequestBatch
from mlsys_core.loop.queue import ServeRequest
from mlsys_dvabatch.scheduling.tasks import StageOutput, StageTask
from mlsys_dvabatch.stages.model import StageModel
from mlsys_serving.isolation import run_in_halves


@dataclass(slots=True)
class StageMeter:
    """Counters of one stage since the start."""

    num_tasks: int = 0
    num_rows: int = 0  # requests, summed over tasks
    num_gathered: int = 0  # rows copied together for it
    busy_s: float = 0.0
    last_s: float = 0.0  # when a task ended last


class StageRunner:
    """One model's stages over a store of activations.

    Args:
        model: the stages.
        inspects: look for early exits after each stage; the model must offer ``inspect``.
        clock: seconds, for the meters.

    Example:
        runner = StageRunner(sliced)
        output = runner.run(task)  # on the executor of task.stage
    """

    def __init__(
        self, model: StageModel, *, inspects: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.model = model
        self.meters = [StageMeter() for _ in range(model.num_stages)]
        self._inspect: Any = getattr(model, "inspect", None) if inspects else None
        self._clock = clock
        self._store: dict[int, Any] = {}  # task number -> what it left
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """Tasks whose output is kept for others."""
        return len(self._store)

    def run(self, task: StageTask) -> StageOutput:
        """Run ``task``; what its model raises is its failure."""
        start_s = self._clock()
        if task.drops:
            with self._lock:
                for number in task.drops:
                    self._store.pop(number, None)
        with torch.inference_mode():
            values = self._inputs(task)
            for stage in range(task.stage, task.last_stage):
                values = self.model.run(stage, values)
                start_s = self._note(stage, task, start_s)
            output = self._output(task, self._stage(task, values))
        self.meters[task.stage].num_gathered += task.num if task.gathers else 0
        self._note(task.last_stage, task, start_s)
        return output

    def _note(self, stage: int, task: StageTask, start_s: float) -> float:
        """Record the work of ``stage`` since ``start_s``; return the current time in seconds."""
        meter = self.meters[stage]
        with self._lock:  # tasks of a stage overlap where one is made ready while another runs
            now_s = self._clock()
            meter.num_tasks += 1
            meter.num_rows += task.num
            meter.busy_s += now_s - max(start_s, meter.last_s)
            meter.last_s = now_s
        return now_s

    def run_whole(self, batch: RequestBatch[Any]) -> list[Any]:
        """Run all stages on a batch of whole requests, for the request-level baselines.

        A batch that fails is run again in halves, until the requests at fault are alone.
        """
        parts, failed = run_in_halves(
            lambda positions: self._whole([batch.requests[position] for position in positions], batch.padded_length),
            batch.size,
        )
        results: list[Any] = [failed.get(position) for position in range(batch.size)]
        for positions, part in parts:
            results[positions.start : positions.stop] = part
        return results

    def _whole(self, requests: Sequence[ServeRequest[Any]], padded_length: int) -> list[Any]:
        with torch.inference_mode():
            values = self.model.collate(requests, padded_length)
            for stage in range(self.model.num_stages):
                values = self.model.run(stage, values)
            return self._results(values, len(requests))

    def _results(self, values: Any, num: int) -> list[Any]:
        results = self.model.results(values)
        if len(results) != num:
            raise ServingError(f"the last stage gave {len(results)} results for {num} requests")
        return results

    def _inputs(self, task: StageTask) -> Any:
        if not task.stage:
            return self.model.collate(task.requests, task.padded_length)
        with self._lock:
            parts = [(self._store[source.task], source.rows) for source in task.sources]
        chosen = [left if rows == tuple(range(left.num)) else left.select(rows) for left, rows in parts]
        return chosen[0].join(chosen[1:]) if len(chosen) > 1 else chosen[0]

    def _stage(self, task: StageTask, values: Any) -> Any:
        if not task.skips:
            return self.model.run(task.last_stage, values)
        runs = [position for position in range(task.num) if position not in task.skips]
        if not runs:
            return values
        passed = sorted(task.skips)
        merged = self.model.run(task.stage, values.select(runs)).join([values.select(passed)])
        order = [*runs, *passed]
        return merged.select([order.index(position) for position in range(task.num)])

    def _output(self, task: StageTask, values: Any) -> StageOutput:
        if task.is_last:
            return StageOutput(results=self._results(values, task.num))
        with self._lock:
            self._store[task.number] = values
        if self._inspect is None:
            return StageOutput()
        exits, skip_to = self._inspect(task.last_stage, values)
        return StageOutput(exits=exits, skip_to=skip_to)
