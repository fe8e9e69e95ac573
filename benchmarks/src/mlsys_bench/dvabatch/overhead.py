"""Closed-loop overhead on threads: one request at a time through DVABatch and through ZeroBatch (Figure 21)."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from mlsys_core.loop import Finished, Scheduler, ServeRequest
from mlsys_core.loop.baselines import ZeroBatch
from mlsys_dvabatch.engine import Engine
from mlsys_dvabatch.scheduling.costs import StageCosts
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.stages.model import StageModel

_NUM_WARM = 64  # requests before those that count: a policy has to see that nobody else comes


class _Waiter:
    def __init__(self) -> None:
        self.done = threading.Event()

    def on_output(self, batch: Any, output: Any, now: float) -> None:
        """Ignore the output; only the end of a request is timed."""

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        self.done.set()


def closed_loop_s(
    model: StageModel,
    costs: StageCosts,
    policy: Policy,
    payload: Any,
    *,
    num: int = 100,
    num_threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Return the median seconds of a request through ZeroBatch and through ``policy``, measured in turn.

    Wall time has in it what others do on the machine, in both alike; ``time.process_time`` counts this process alone.
    """
    waiters = [_Waiter(), _Waiter()]
    makers: list[Policy | Scheduler[Any, Any, Any]] = [ZeroBatch(max_batch_size=64), policy]
    engines = [
        Engine(model, costs, made, listener=waiter, num_threads=num_threads)
        for made, waiter in zip(makers, waiters, strict=True)
    ]
    times: list[list[float]] = [[], []]
    try:
        for engine in engines:
            engine.loop.start()
        for number in range(num + _NUM_WARM):
            for which, (engine, waiter) in enumerate(zip(engines, waiters, strict=True)):
                waiter.done.clear()
                start_s = clock()
                engine.loop.submit(ServeRequest(str(number), payload), str(number))
                waiter.done.wait()
                if number >= _NUM_WARM:
                    times[which].append(clock() - start_s)
    finally:
        for engine in engines:
            engine.close()
    return statistics.median(times[0]), statistics.median(times[1])
