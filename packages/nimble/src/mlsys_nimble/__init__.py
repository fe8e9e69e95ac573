"""Nimble: ahead-of-time stream scheduling of PyTorch models."""

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_nimble.errors import CaptureError, InternalError
    from mlsys_nimble.ir.graph import OperatorGraph, build_graph, read_graph
    from mlsys_nimble.module import Nimble, compile  # noqa: A004
    from mlsys_nimble.planning.streams import StreamAssignment, SyncEvent, assign_streams, plan_events
    from mlsys_nimble.saved.loading import SavedModel, load

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "InternalError",
    "Nimble",
    "OperatorGraph",
    "SavedModel",
    "StreamAssignment",
    "SyncEvent",
    "assign_streams",
    "build_graph",
    "compile",
    "load",
    "plan_events",
    "read_graph",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "errors": ["CaptureError", "InternalError"],
        "ir.graph": ["OperatorGraph", "build_graph", "read_graph"],
        "module": ["Nimble", "compile"],
        "planning.streams": ["StreamAssignment", "SyncEvent", "assign_streams", "plan_events"],
        "saved.loading": ["SavedModel", "load"],
    },
)
