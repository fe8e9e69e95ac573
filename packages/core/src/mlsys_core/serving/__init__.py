"""Serving: the one loop, its protocols, executors and clocks, request queue and request-level baselines.

Imports no torch and no web framework; the HTTP front is ``mlsys_core.serving.http``. See docs/serving-loop.md.
"""

from mlsys_core.serving.clock import VirtualClock, WallClock
from mlsys_core.serving.executors import InlineExecutor, ThreadExecutor
from mlsys_core.serving.inbox import LoopClosedError, LoopState
from mlsys_core.serving.listeners import Collector
from mlsys_core.serving.loop import ServingLoop
from mlsys_core.serving.protocols import (
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
from mlsys_core.serving.queue import QueueFullError, RequestQueue
from mlsys_core.serving.request import ServeRequest
from mlsys_core.serving.simulated import ServedRequest, SimulatedExecutor, SimulatedRun, Simulation, simulate
from mlsys_core.serving.stream_executor import EventSignal, Signal, StreamExecutor

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
