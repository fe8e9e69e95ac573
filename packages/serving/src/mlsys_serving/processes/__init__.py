"""Processes of one server: a supervisor that forks them, watches them and restarts them, and the frames they exchange.

The supervisor loads what all need and then forks: memory is shared, nothing is loaded twice, and a process that dies is
replaced within milliseconds. It computes nothing itself. Linux only (pidfd, prctl).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

__all__ = [
    "Boxes",
    "Child",
    "Death",
    "FrameChannel",
    "FrameReader",
    "RestartBudget",
    "Standing",
    "Supervisor",
    "SupervisorLink",
    "can_supervise",
    "frame",
    "is_stopped",
]

if TYPE_CHECKING:
    from mlsys_serving.processes.box import Boxes
    from mlsys_serving.processes.channel import FrameChannel, FrameReader, frame
    from mlsys_serving.processes.children import Child, Death, Standing, can_supervise, is_stopped
    from mlsys_serving.processes.recovery import RestartBudget
    from mlsys_serving.processes.supervisor import Supervisor
    from mlsys_serving.processes.workers import SupervisorLink

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "box": ["Boxes"],
        "channel": ["FrameChannel", "FrameReader", "frame"],
        "children": ["Child", "Death", "Standing", "can_supervise", "is_stopped"],
        "recovery": ["RestartBudget"],
        "supervisor": ["Supervisor"],
        "workers": ["SupervisorLink"],
    },
)
