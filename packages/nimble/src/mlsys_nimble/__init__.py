"""Nimble: ahead-of-time stream scheduling of PyTorch models."""

from typing import TYPE_CHECKING, Any

from mlsys_nimble.ir.graph import OperatorGraph, build_graph, read_graph
from mlsys_nimble.planning.streams import StreamAssignment, assign_streams
from mlsys_nimble.planning.sync import SyncEvent, plan_events

if TYPE_CHECKING:
    from mlsys_nimble.errors import CaptureError, InternalError
    from mlsys_nimble.module import Nimble, compile  # noqa: A004

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "InternalError",
    "Nimble",
    "OperatorGraph",
    "StreamAssignment",
    "SyncEvent",
    "assign_streams",
    "build_graph",
    "compile",
    "plan_events",
    "read_graph",
]

_LAZY = {  # by name, modules that import torch
    "CaptureError": "mlsys_nimble.errors",
    "InternalError": "mlsys_nimble.errors",
    "Nimble": "mlsys_nimble.module",
    "compile": "mlsys_nimble.module",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
