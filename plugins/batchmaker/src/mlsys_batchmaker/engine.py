"""The engine: a model behind core's serving loop, with one worker or several.

submit (any thread): unfold -> loop -> :class:`CellularScheduler` -> workers -> finish -> the request's future.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

import torch
from mlsys_core.device import get_device
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.loop import (
    Clock,
    Finished,
    FinishReason,
    LoopRecorder,
    ServingLoop,
    StreamExecutor,
    ThreadExecutor,
    WallClock,
)
from mlsys_core.loop.protocols import Executor
from mlsys_core.memory import find_pool
from mlsys_core.report import facts_html
from mlsys_serving.isolation import NotFiniteError, is_finite
from mlsys_serving.tracing import EngineTrace, EngineTraces
from mlsys_serving.watch import BatchSource
from torch import Tensor

from mlsys_batchmaker.models.model import Model, Payload
from mlsys_batchmaker.scheduling.requests import CellRequest, CellResult, Values
from mlsys_batchmaker.scheduling.scheduler import CellularScheduler
from mlsys_batchmaker.scheduling.state import Counters, SchedulerConfig
from mlsys_batchmaker.scheduling.tasks import Round, RoundOutput
from mlsys_batchmaker.workers.cuda import RoundTimes, counter_or_events, cuda_graph, to_pinned
from mlsys_batchmaker.workers.materialise import AUTO, MaterialisedCell, find_compiler
from mlsys_batchmaker.workers.pool import DEFAULT_POOL_BYTES, AllPools, StatePool, plan_rows
from mlsys_batchmaker.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings for running a model.

    Raises:
        InvalidInputError: a number is below 1.
    """

    num_workers: int = 1  # each a thread of its own with one thread of torch
    executor: Literal["cell", "chunk"] = "chunk"  # a step a task (the paper), or a round's steps in one call
    max_tasks_to_submit: int = 5
    round_s: float = 0.001  # chunks of cheap cells take more steps, as long as a round lasts no longer
    lookahead: Literal["speculative", "one"] = "speculative"
    max_waiting: int | None = None
    max_cells: int | None = None  # most cells of a request; None: the model's own limit
    pool_bytes: int = DEFAULT_POOL_BYTES
    memory_pool: str | None = None  # the registered name of the pool of state rows; None: the core's own
    compiler: str = AUTO  # a name of the registry, "eager", or "auto": on the CPU this package's own loops for the
    # cells that have a form for them, for others Nimble where a plugin offers it, and eager for what Nimble refuses
    device: str = "cpu"  # the registered name of where the cells run
    devices: tuple[str, ...] = ()  # several: each has a worker and a state pool of its own; (): the workers' one

    def __post_init__(self) -> None:
        if self.devices and (self.num_workers, self.device) != (1, "cpu"):
            raise InvalidInputError("devices have a worker each: leave out num_workers and device")
        if self.num_workers < 1:
            raise InvalidInputError(f"num_workers={self.num_workers}: at least 1 is needed")
        if self.max_cells is not None and self.max_cells < 1:
            raise InvalidInputError(f"max_cells={self.max_cells}: at least 1 is needed")
        self.scheduling()  # checks the others

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The registered name of each worker's device."""
        return self.devices or (self.device,) * self.num_workers

    def scheduling(self) -> SchedulerConfig:
        """Return the settings of the scheduler."""
        return SchedulerConfig(
            max_tasks_to_submit=self.max_tasks_to_submit,
            batching=self.executor,
            round_s=self.round_s,
            lookahead=self.lookahead,
            max_waiting=self.max_waiting,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """Outputs of a request, and the times it took."""

    outputs: Payload
    result: CellResult

    @property
    def queue_s(self) -> float:
        """Seconds from admission to the start of its first task."""
        return self.result.started_s - self.result.added_s

    @property
    def compute_s(self) -> float:
        """Seconds from the start of its first task to its end."""
        return self.result.ended_s - self.result.started_s


class CancelledError(MlsysError):
    """The request was cancelled, its deadline passed, or the engine was stopped."""


class Engine:
    """Server of one model; close it, or use it as a context manager.

    Args:
        model: model to serve.
        config: settings of the engine.
        recorder: gets a span per round.
        on_round: called with every round that is done, in the loop's thread.
        cells: the model's, where they have been made ready already; None: they are made here.

    Example:
        >>> from mlsys_batchmaker.models.sequence import lstm_model
        >>> import numpy as np
        >>> with Engine(lstm_model(num_words=9, hidden_size=8)) as engine:
        ...     engine.submit({"words": np.array([1, 2, 3])}).result().outputs["hidden"].shape
        (8,)
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        recorder: LoopRecorder | None = None,
        on_round: Callable[[Round, RoundOutput], None] | None = None,
        cells: Sequence[MaterialisedCell] | None = None,
    ) -> None:
        self.model = model
        self.config = EngineConfig() if config is None else config
        clock = WallClock()
        self._clock = clock
        self._on_round = on_round
        self._futures: dict[str, tuple[Future[Answer], Payload]] = {}
        self._numbers = itertools.count()
        self.scheduler, pools = make_scheduler(model, self.config)
        self.score_source = BatchSource(label_of=self._label)
        self._traces = EngineTraces(self.scheduler.members, watcher=self.score_source)
        workers = make_workers(model, pools, self.config, clock, cells)
        executors: list[Executor[Round, RoundOutput]] = [
            make_executor(worker, self.config, clock, number) for number, worker in enumerate(workers)
        ]
        self._loop: ServingLoop[CellRequest, Round, RoundOutput] = ServingLoop(
            self.scheduler, executors, clock, recorder=recorder, listener=self, traces=self._traces
        )
        self._loop.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        """Return a table of the model and the counters, for notebooks."""
        cells = ", ".join(dict.fromkeys(cell.name for cell in self.model.layout.cells))
        counters = self.counters
        facts = {
            "cells": cells,
            "workers": f"{len(self.config.worker_devices)} on {', '.join(dict.fromkeys(self.config.worker_devices))}",
            "rounds": f"at most {self.config.max_tasks_to_submit} steps, {self.config.executor}",
            "unfinished": self.num_unfinished,
            "tasks so far": f"{counters.tasks:,}, of {counters.effective_batch_size:.1f} cells",
        }
        return facts_html(self.model.name, facts)

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return self.scheduler.counters

    @property
    def num_unfinished(self) -> int:
        """Number of requests accepted that have not left."""
        return self._loop.num_unfinished

    def submit(
        self,
        request: Payload,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        on_values: Callable[[Values], None] | None = None,
    ) -> Future[Answer]:
        """Unfold and accept a request. From any thread; cancel it through the future's id with :meth:`cancel`.

        Args:
            request: its tensors.
            request_id: unique among the unfinished; None: a number.
            timeout_s: it leaves when that has passed.
            on_values: called with the results of each node as they come, in the loop's thread.

        Raises:
            InvalidInputError: the request is not acceptable, or its id is in use; nothing else is affected.
            LoopClosedError: the engine is closing.
        """
        unfolded = self.model.unfold(request, max_cells=self.config.max_cells)
        name = f"#{next(self._numbers)}" if request_id is None else request_id
        deadline_s = None if timeout_s is None else self._clock.now() + timeout_s
        future: Future[Answer] = Future()
        if self._futures.setdefault(name, (future, request))[0] is not future:
            raise InvalidInputError(f"request id {name!r} belongs to an unfinished request: ids must be unique")
        trace = self._traces.open(name, operation="infer", model=self.model.name)
        if trace is not None and on_values is not None:
            on_values = partial(_noted, trace, on_values)
        try:
            parts = unfolded.plan, unfolded.constants
            self._loop.submit(CellRequest(name, *parts, deadline_s, on_values, unfolded.grow), name)
        except BaseException:
            del self._futures[name]
            self._traces.close(name, "refused")
            raise
        return future

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its future raises :class:`CancelledError`, unless it was cancelled itself."""
        self._loop.cancel(request_id)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests and finish those accepted; whether all were."""
        return self._loop.drain(timeout_s)

    def close(self) -> None:
        """Stop; unfinished requests are cancelled. Idempotent."""
        self._loop.stop()

    def _label(self, batch: Round) -> str:
        """Return the name of a round on the score: its cells."""
        return ", ".join(dict.fromkeys(self.model.layout.cells[task.cell].name for task in batch.tasks))

    def on_output(self, batch: Round, output: RoundOutput, now: float) -> None:
        """See :class:`mlsys_core.loop.Listener`."""
        if self._on_round is not None:
            self._on_round(batch, output)

    def on_finished(self, finished: Finished[CellResult], now: float) -> None:
        """See :class:`mlsys_core.loop.Listener`."""
        if self._traces:
            self._traces.close(finished.request_id, finished.reason.value)
        future, request = self._futures.pop(finished.request_id)
        if not future.set_running_or_notify_cancel():
            return
        if finished.reason is FinishReason.DONE:
            assert finished.result is not None
            try:
                outputs = self.model.architecture.finish(request, finished.result.values)
                if not is_finite(dict(outputs)):
                    raise NotFiniteError
            except Exception as error:  # noqa: BLE001 - a request boundary: its answer cannot be made, others go on
                future.set_exception(error)
            else:
                future.set_result(Answer(outputs, finished.result))
        else:
            cause = finished.error or CancelledError(f"request {finished.request_id!r}: {finished.reason.value}")
            future.set_exception(cause)


def _noted(trace: EngineTrace, on_values: Callable[[Values], None], values: Values) -> None:
    """Pass a node's results on; the trace notes the first."""
    if trace.first_output_s is None:
        trace.first_output_s = time.perf_counter()
    on_values(values)


def make_scheduler(model: Model, config: EngineConfig) -> tuple[CellularScheduler, list[StatePool]]:
    """Make the scheduler of a model and the state pool of each device; a row has one number in all."""
    rows = plan_rows(model.layout, config.pool_bytes)
    names = config.devices or (config.device,)
    pools = [StatePool(model.layout, rows, get_device(name).torch_name) for name in names]
    scheduler = CellularScheduler(
        model.layout,
        config=config.scheduling(),
        devices=range(len(pools)) if config.devices else [0] * config.num_workers,
        num_rows=rows,
        store=AllPools(pools),
        new_rows=find_pool(config.memory_pool, "runs"),
    )
    return scheduler, pools


def make_cells(model: Model, config: EngineConfig, name: str | None = None) -> list[MaterialisedCell]:
    """Make a model's cells ready for every batch size, which may take seconds; engines may share them.

    Args:
        model: The model.
        config: Settings of the engine.
        name: A device; None: that of the first worker. Others get weights of their own.

    Raises:
        InvalidInputError: A compiler that was asked for by name cannot take a cell.
    """
    first = get_device(config.worker_devices[0])
    device = torch.device((first if name is None else get_device(name)).torch_name)
    has_own = str(device) != first.torch_name
    on_gpu = device.type == "cuda"
    compiler = cuda_graph if on_gpu and config.compiler == AUTO else find_compiler(config.compiler)
    is_auto = config.compiler == AUTO
    in_place = is_auto and device.type == "cpu"
    return [
        MaterialisedCell(
            replace(cell, module=copy.deepcopy(cell.module)) if has_own else cell,
            device=device,
            compiler=compiler,
            in_place=in_place,
            falls_back=is_auto,
        )
        for cell in model.cells
    ]


def make_workers(
    model: Model,
    pools: Sequence[StatePool],
    config: EngineConfig,
    clock: Clock,
    cells: Sequence[MaterialisedCell] | None = None,
) -> list[Worker]:
    """Make workers that share the state pool of their device, and its cells.

    Args:
        model: The model.
        pools: Of all devices.
        config: Settings of the engine.
        clock: The loop's.
        cells: Those of the first worker's device; None: they are made here, as those of other devices are.
    """
    made = {pools[0].device: make_cells(model, config) if cells is None else cells}
    workers = []
    for number, name in enumerate(config.worker_devices):
        device = number if config.devices else 0
        at = pools[device].device
        if at not in made:
            made[at] = make_cells(model, config, name)
        to_host = to_pinned if at.type == "cuda" else Tensor.cpu
        workers.append(Worker(model.layout, made[at], pools, device=device, clock=clock, to_host=to_host))
    return workers


def make_executor(worker: Worker, config: EngineConfig, clock: Clock, number: int) -> Executor[Round, RoundOutput]:
    """Make the executor of one worker: a thread of its own on the CPU, a stream of its own on any other device."""
    device = get_device(config.worker_devices[number])
    if device.kind == "cpu":
        return ThreadExecutor(worker, max_in_flight=config.max_tasks_to_submit, name=f"batchmaker-{number}")
    return StreamExecutor(
        worker,
        device,
        clock,
        max_in_flight=config.max_tasks_to_submit,
        signal=partial(counter_or_events, device) if device.kind == "cuda" else None,
        finish=RoundTimes(),
    )
