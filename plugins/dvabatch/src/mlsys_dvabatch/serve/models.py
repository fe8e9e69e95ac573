"""DVABatch's models behind core's Open Inference Protocol front, with metrics for each stage."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import numpy as np
from mlsys_core.loop import Scheduler, ServeRequest
from mlsys_core.loop.baselines import RequestBatch
from mlsys_core.loop.clock import WallClock
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler
from mlsys_dvabatch.scheduling.tasks import StageOutput, StageTask
from mlsys_dvabatch.serve.spec import WireForm, wire_form
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_serving.http.streaming import RequestThreads
from mlsys_serving.models import Executions, InferRequest, InferResponse, LoopClient
from mlsys_serving.tracing import EngineTraces
from mlsys_serving.watch import BatchSource
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class _Listener(LoopClient[Any, Any, Any]):
    """Listener that hands results to coroutines and counts executions."""

    def __init__(self, executions: Executions, model: str, traces: EngineTraces) -> None:
        super().__init__(model=model, traces=traces)
        self._executions = executions

    def on_output(self, batch: StageTask | RequestBatch[Any], output: StageOutput | list[Any], now: float) -> None:
        """Count one execution for each batch that reached the last stage."""
        if isinstance(batch, RequestBatch):
            self._executions.record(batch.size)
        elif batch.is_last:
            self._executions.record(batch.num)


class ServedModel:
    """One model, its engine and its form on the wire: every row of a request is batched by itself.

    Args:
        loaded: the model.
        costs: Costs of its stages.
        policy: A policy of this package, or one of core's baselines.
        max_batch_size: most rows in a batch, and in one request.
        max_waiting: most rows waiting.
        num_threads: cores to use.
        form: the model's, where it is known already; None: found here.
        threads: for what requests bring and get, closed with the model; None: the event loop's, and one for large work.
    """

    def __init__(
        self,
        loaded: Loaded,
        costs: StageCosts,
        policy: Policy | Scheduler[Any, Any, Any],
        *,
        max_batch_size: int = 64,
        max_waiting: int = 1024,
        num_threads: int | None = None,
        form: WireForm | None = None,
        threads: RequestThreads | None = None,
    ) -> None:
        self.executions = Executions()
        self.threads = threads or RequestThreads("dvabatch")
        self._model = loaded.model
        self.score_source = BatchSource(label_of=_label)
        traces = EngineTraces(_members, watcher=self.score_source)
        self._client = _Listener(self.executions, loaded.name, traces)
        form = form or wire_form(loaded, max_batch_size=max_batch_size)
        self.spec, self.wire = form.spec, form.wire
        self.max_batch_size, self.max_waiting = max_batch_size, max_waiting
        self._most_at_once = max(max_batch_size, min(4 * max_batch_size, max_waiting // 2))
        self.clock = WallClock()
        self.engine = Engine(
            self._model,
            costs,
            policy,
            listener=self._client,
            max_batch_size=max_batch_size,
            max_waiting=max_waiting,
            num_threads=num_threads,
            device=loaded.device,
            clock=self.clock,
            traces=traces,
        )
        self.engine.loop.start()

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run all rows of a request; the first that fails fails the request, and the others are given up."""
        size = sum(_size(array) for array in request.inputs.values())
        rows, lengths = await self.threads.run(self._checked_rows, request, size=size)
        results = await self._run(request.key, rows, lengths, priority=request.priority, deadline_s=request.deadline_s)
        columns = [result if isinstance(result, tuple) else (result,) for result in results]
        stacked = [np.stack(column) for column in zip(*columns, strict=True)]
        return InferResponse({tensor.name: array for tensor, array in zip(self.spec.outputs, stacked, strict=True)})

    async def run_rows(self, rows: Sequence[Any], key: str) -> list[Any]:
        """Return each row's answer: an array, or a tuple of arrays of several outputs.

        The first row that fails fails all, and the others are given up.

        Args:
            rows: As the staged model takes them; any number: they are batched with those of other requests.
            key: Unique among running requests.

        Raises:
            InvalidInputError: The model does not take a row.
            QueueFullError: Too many rows wait already.
        """
        lengths = await self.threads.run(lambda: [self._model.check(row) for row in rows], size=64 * len(rows))
        return await self._run(key, rows, lengths)

    async def close(self) -> None:
        """Stop the engine."""
        await asyncio.to_thread(self.engine.close)
        self.threads.close()

    def _checked_rows(self, request: InferRequest) -> tuple[list[Any], list[int]]:
        """Return the rows and their lengths, all checked before any is submitted."""
        rows = self.wire.payloads(request.inputs, request.num_rows)
        return rows, [self._model.check(row) for row in rows]

    async def _run(
        self,
        key: str,
        rows: Sequence[Any],
        lengths: Sequence[int],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> list[Any]:
        def submitted(number: int) -> Coroutine[Any, Any, Any]:
            name = f"{key}.{number}"
            request = ServeRequest(name, rows[number], length=lengths[number], priority=priority, deadline_s=deadline_s)
            return self._client.submit(self.engine.loop, request, name)

        if len(rows) == 1:
            return [await submitted(0)]
        # A request of many rows leaves room in the queue for others, and always fills the next batches.
        room = asyncio.Semaphore(self._most_at_once)

        async def submit(number: int) -> Any:
            async with room:
                return await submitted(number)

        tasks = [asyncio.ensure_future(submit(number)) for number in range(len(rows))]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


def _members(batch: StageTask | RequestBatch[Any]) -> list[str]:
    return [request.request_id for request in batch.requests]


def _label(batch: StageTask | RequestBatch[Any]) -> str:
    """Return the name of a batch on the score: its stages."""
    if isinstance(batch, RequestBatch):
        return "whole model"
    return f"stage {batch.stage + 1}" + (f"-{batch.last_stage + 1}" if batch.last_stage > batch.stage else "")


def _size(array: np.ndarray[Any, Any]) -> int:
    """Return the work of reading an input: characters to tokenise, or a 64th of the bytes that numpy reads."""
    return sum(map(len, array.ravel())) if array.dtype == np.object_ else array.nbytes // 64


class StageMetrics:
    """Prometheus collector of what each stage did and what the policy ordered.

    Args:
        models: iterated over at each collection.
    """

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """Collect all counters, by model and stage."""
        labels = ["model", "stage"]
        families = {
            "num_tasks": CounterMetricFamily("mlsys_dvabatch_stage_tasks", "Tasks run by a stage.", labels=labels),
            "num_rows": CounterMetricFamily("mlsys_dvabatch_stage_rows", "Requests in those tasks.", labels=labels),
            "num_gathered": CounterMetricFamily(
                "mlsys_dvabatch_stage_gathered_rows", "Requests copied together for them.", labels=labels
            ),
            "busy_s": CounterMetricFamily("mlsys_dvabatch_stage_busy_seconds", "Time in the stage.", labels=labels),
        }
        operations = CounterMetricFamily(
            "mlsys_dvabatch_operations", "Meta-operations and what else was decided.", labels=["model", "operation"]
        )
        active = GaugeMetricFamily("mlsys_dvabatch_active_requests", "Requests in batches.", labels=["model"])
        for model in self._models:
            name, scheduler = model.spec.name, model.engine.scheduler
            for stage, meter in enumerate(model.engine.runner.meters):
                for field, family in families.items():
                    family.add_metric([name, str(stage)], float(getattr(meter, field)))
            if isinstance(scheduler, DvaScheduler):
                for operation, count in dict(scheduler.counters).items():
                    operations.add_metric([name, operation.replace(" ", "_")], count)
                active.add_metric([name], scheduler.state.num_active)
        return [*families.values(), operations, active]
