"""Serving: the one loop, its protocols, executors and clocks, request queue and request-level baselines.

Imports no torch and no web framework; the HTTP front is ``mlsys_serving.http``. See docs/serving-loop.md.
"""

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports
from mlsys_core.loop.clock import VirtualClock, WallClock
from mlsys_core.loop.dispatch import Collector
from mlsys_core.loop.inbox import LoopClosedError, LoopState
from mlsys_core.loop.inline import InlineExecutor
from mlsys_core.loop.protocols import (
    Clock,
    Draining,
    Executor,
    Expiring,
    Finished,
    FinishReason,
    Listener,
    LoopRecorder,
    RequestId,
    Scheduler,
    WorkerId,
)
from mlsys_core.loop.queue import QueueFullError, RequestQueue, ServeRequest
from mlsys_core.loop.serving_loop import ServingLoop

if TYPE_CHECKING:
    from mlsys_core.loop.executors import EventSignal, Signal, StreamExecutor, ThreadExecutor
    from mlsys_core.loop.simulated import ServedRequest, SimulatedExecutor, SimulatedRun, Simulation, simulate

__all__ = [
    "Clock",
    "Collector",
    "Draining",
    "EventSignal",
    "Executor",
    "Expiring",
    "FinishReason",
    "Finished",
    "InlineExecutor",
    "Listener",
    "LoopClosedError",
    "LoopRecorder",
    "LoopState",
    "QueueFullError",
    "RequestId",
    "RequestQueue",
    "Scheduler",
    "ServeRequest",
    "ServedRequest",
    "ServingLoop",
    "Signal",
    "SimulatedExecutor",
    "SimulatedRun",
    "Simulation",
    "StreamExecutor",
    "ThreadExecutor",
    "VirtualClock",
    "WallClock",
    "WorkerId",
    "simulate",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "executors": ["EventSignal", "Signal", "StreamExecutor", "ThreadExecutor"],
        "simulated": ["ServedRequest", "SimulatedExecutor", "SimulatedRun", "Simulation", "simulate"],
    },
)
