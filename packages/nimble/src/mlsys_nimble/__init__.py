"""Nimble: ahead-of-time stream scheduling of PyTorch models."""

from mlsys_nimble.graph import OperatorGraph, build_graph, read_graph
from mlsys_nimble.streams import StreamAssignment, assign_streams
from mlsys_nimble.sync import SyncEvent, plan_events

__version__ = "0.1.0"

__all__ = [
    "OperatorGraph",
    "StreamAssignment",
    "SyncEvent",
    "assign_streams",
    "build_graph",
    "plan_events",
    "read_graph",
]
