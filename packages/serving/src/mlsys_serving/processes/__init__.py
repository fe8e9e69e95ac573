"""Processes of one server: a supervisor that forks them, watches them and restarts them, and the frames they exchange.

The supervisor loads what all need and then forks: memory is shared, nothing is loaded twice, and a process that dies is
replaced within milliseconds. It computes nothing itself. Above it a master may fork one such server after the other,
each with other settings, while the one before finishes what runs. Linux only (pidfd, prctl).
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
    "GenerationLink",
    "GenerationStatus",
    "Generations",
    "Handover",
    "Outcome",
    "ReloadFailedError",
    "ReloadRefusedError",
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
    from mlsys_serving.processes.generation_link import (
        GenerationLink,
        GenerationStatus,
        Outcome,
        ReloadFailedError,
        ReloadRefusedError,
    )
    from mlsys_serving.processes.generations import Generations
    from mlsys_serving.processes.handover import Handover
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
        "generation_link": [
            "GenerationLink",
            "GenerationStatus",
            "Outcome",
            "ReloadFailedError",
            "ReloadRefusedError",
        ],
        "generations": ["Generations"],
        "handover": ["Handover"],
        "restarts": ["RestartBudget"],
        "standing": ["Standing"],
        "supervisor": ["Supervisor"],
        "supervisor_link": ["SupervisorLink"],
    },
)
