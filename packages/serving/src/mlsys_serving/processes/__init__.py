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
    from mlsys_serving.processes.channel import FrameChannel
    from mlsys_serving.processes.children import Child, Death, can_supervise, is_stopped
    from mlsys_serving.processes.frames import FrameReader, frame
    from mlsys_serving.processes.restarts import RestartBudget
    from mlsys_serving.processes.standing import Standing
    from mlsys_serving.processes.supervisor import Supervisor
    from mlsys_serving.processes.supervisor_link import SupervisorLink

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "box": ["Boxes"],
        "channel": ["FrameChannel"],
        "children": ["Child", "Death", "can_supervise", "is_stopped"],
        "frames": ["FrameReader", "frame"],
        "restarts": ["RestartBudget"],
        "standing": ["Standing"],
        "supervisor": ["Supervisor"],
        "supervisor_link": ["SupervisorLink"],
    },
)
