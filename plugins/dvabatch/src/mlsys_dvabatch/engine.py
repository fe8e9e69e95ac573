"""A staged model behind core's serving loop: scheduler, executors and runner put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mlsys_core.device import Device, Event
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Listener, Scheduler, ServingLoop, ThreadExecutor, WallClock
from mlsys_core.loop import StreamExecutor as WholeExecutor
from mlsys_core.loop.protocols import Clock
from mlsys_core.posix.machine import allowed_cores
from mlsys_core.report import facts_html
from mlsys_serving.tracing import EngineTraces

from mlsys_dvabatch.executors.runner import StageRunner
from mlsys_dvabatch.executors.stage_executors import StageExecutor, StreamExecutor
from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.scheduler import DvaScheduler
from mlsys_dvabatch.stages.model import StageModel, Triable

NO_EXITS = (
    "policy early-exit: this model has no exits, so no request could ever leave early; give a .pt2 whose outputs are "
    "exit heads, or take another policy"
)


class Engine:
    """Server of one model with one policy. Close it, or use it as a context manager.

    On a CPU the parallel manner runs as many executors at a time as there are cores, each with one thread, pinned where
    every executor can have a core of its own; the serial manner gives each all cores.

    Args:
        model: The staged model.
        costs: seconds of its stages.
        policy: A policy of this package, or a scheduler of whole requests (core's baselines).
        listener: hears who finished.
        max_batch_size: most requests in a batch.
        max_waiting: most requests waiting.
        num_threads: cores to use; None: all this process may use.
        num_pairs: buffer pairs; None: what the policy is made for.
        traces: Traces of requests, with the stages they run in; None: requests are not traced.
        device: Device of the stages; None, or one of kind ``"cpu"``: on threads of the host.

    Raises:
        InvalidInputError: the model mixes requests in batches that large, or has no exits for a policy that needs them.

    Example:
        with Engine(model, costs, OperatorPolicy(), listener=collector) as engine:
            engine.loop.submit(ServeRequest("a", payload), "a")
            engine.loop.drain()
    """

    def __init__(
        self,
        model: StageModel,
        costs: StageCosts,
        policy: Policy | Scheduler[Any, Any, Any],
        *,
        listener: Listener[Any, Any] | None = None,
        max_batch_size: int = 64,
        max_waiting: int | None = None,
        num_threads: int | None = None,
        num_pairs: int | None = None,
        device: Device | None = None,
        clock: Clock | None = None,
        traces: EngineTraces | None = None,
    ) -> None:
        if isinstance(policy, Policy) and policy.wants_exits and not hasattr(model, "inspect"):
            raise InvalidInputError(NO_EXITS)
        if isinstance(model, Triable):
            model.isolation.require(max_batch_size)
        clock = WallClock() if clock is None else clock
        if device is not None and device.kind == "cpu":
            device = None
        self.runner = StageRunner(model, inspects=isinstance(policy, Policy) and policy.wants_exits)
        self.scheduler: Scheduler[Any, Any, Any]
        if isinstance(policy, Policy):
            cores = sorted(allowed_cores() or range(num_threads or torch.get_num_threads()))[:num_threads]
            is_serial = (policy.num_pairs if num_pairs is None else num_pairs) == 1
            concurrency = 1 if is_serial and device is None else None if device is not None else len(cores)
            self._looks_ahead = (
                device is None and model.num_stages == 1 and bool(getattr(model, "computes_in_turn", False))
            )
            self.scheduler = DvaScheduler(
                policy,
                costs,
                max_batch_size=max_batch_size,
                max_waiting=max_waiting,
                num_pairs=num_pairs,
                concurrency=concurrency,
                looks_ahead=self._looks_ahead,
            )
            executors: Any = self._stage_executors(model.num_stages, cores, is_serial, device, policy)
        else:
            self.scheduler = policy
            executors = (
                ThreadExecutor(_with_threads(self.runner.run_whole, num_threads), max_in_flight=1)
                if device is None
                else WholeExecutor(self.runner.run_whole, device, clock)
            )
        self.loop: ServingLoop[Any, Any, Any] = ServingLoop(
            self.scheduler, executors, clock, listener=listener, traces=traces
        )
        self.clock = clock
        self._facts = {
            "model": type(model).__name__,
            "stages": model.num_stages,
            "policy": type(policy).__name__,
            "requests in a batch": f"at most {max_batch_size}",
            "device": "cpu" if device is None else device.kind,
        }

    def _repr_html_(self) -> str:
        """Return a table of the settings, for notebooks."""
        return facts_html("DVABatch engine", {**self._facts, "unfinished": self.loop.num_unfinished})

    def __enter__(self) -> Engine:
        self.loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop: unfinished requests leave as cancelled."""
        self.loop.stop()

    def _stage_executors(
        self, num_stages: int, cores: list[int], is_serial: bool, device: Device | None, policy: Policy
    ) -> list[StageExecutor]:
        run = self.runner.run
        if device is not None:
            events: dict[tuple[int, int], Event] = {}
            waits = policy.wants_exits
            return [
                StreamExecutor(stage, run, device=device, events=events, waits_always=waits)
                for stage in range(num_stages)
            ]
        is_alone = is_serial or num_stages == 1  # nothing runs beside a stage: it has all cores
        can_pin = not is_alone and num_stages <= len(cores)
        threads = len(cores) if is_alone else 1
        return [
            StageExecutor(
                stage,
                run,
                core=cores[stage] if can_pin else None,
                num_threads=threads,
                num_ahead=1 if self._looks_ahead else 0,
            )
            for stage in range(num_stages)
        ]


def _with_threads(run: Callable[[Any], Any], num_threads: int | None) -> Callable[[Any], Any]:
    """Return ``run`` wrapped so that each thread sets torch's number of threads before its first call."""
    has_set = False

    def wrapped(batch: Any) -> Any:
        nonlocal has_set
        if not has_set and num_threads is not None:
            torch.set_num_threads(num_threads)
            has_set = True
        return run(batch)

    return wrapped
