"""One page about a model: its graph to zoom in, a real replay by worker, the critical path, what each pass changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_nimble.explain.critical import Task, critical_path
from mlsys_nimble.explain.drawing import places
from mlsys_nimble.ir.graph import build_graph
from mlsys_nimble.planning.streams import assign_streams
from mlsys_nimble.planning.sync import plan_events

if TYPE_CHECKING:
    from mlsys_core.graphs import Graph

    from mlsys_nimble.explain import Explanation

_TEMPLATE = Path(__file__).with_name("page.html")


def page(title: str, found: Explanation, replayed: Graph, tasks: Sequence[Task]) -> str:
    """Return a page that needs nothing beside itself.

    Args:
        title: The model's name.
        found: What was decided without measured times.
        replayed: Operators that the replay runs; see :meth:`mlsys_nimble.planning.schedule.Schedule.to_networkx`.
        tasks: Times of one replay's tasks; their operators are nodes of ``replayed``.
    """
    data = json.dumps(page_data(found, replayed, tasks), separators=(",", ":")).replace("<", "\\u003c")
    return _TEMPLATE.read_text().replace("{{title}}", escape(title)).replace("{{data}}", data)


def page_data(found: Explanation, replayed: Graph, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return all that the page shows as JSON values; times are in microseconds from the replay's begin."""
    graph = build_graph(list(replayed), list(replayed.edges))
    assignment = assign_streams(graph)
    start = min((task.begin_ns for task in tasks), default=0)
    path = critical_path(tasks, {name: list(replayed.predecessors(name)) for name in replayed})
    is_critical = {tasks[link.task].operator for link in path}
    nodes = [
        {
            "name": name,
            "kind": replayed.nodes[name].get("kind", ""),
            "shape": replayed.nodes[name].get("shape", ""),
            "source": replayed.nodes[name].get("source", ""),
            "us": round(1e6 * float(replayed.nodes[name].get("seconds", 0.0)), 2),
            "stream": stream,
            "at": at,
            "critical": name in is_critical,
        }
        for name, stream, at in zip(graph.names, assignment.stream_of, places(assignment), strict=True)
    ]
    index = {name: number for number, name in enumerate(graph.names)}
    shown = [
        [index[task.operator], task.worker, (task.begin_ns - start) / 1e3, (task.end_ns - start) / 1e3]
        for task in tasks
    ]
    waited = {link.task: link.waited_ns / 1e3 for link in path}
    return {
        "nodes": nodes,
        "edges": [list(edge) for edge in assignment.meg_edges],
        "waits": [[event.producer, event.consumer] for event in plan_events(assignment)],
        "tasks": shown,
        "path": [[link.task, waited[link.task]] for link in path],
        "counts": {"captured": found.captured.counts(), "after the passes": found.optimised.counts()},
        "passes": found.record()["passes"],
        "memory": found.record()["memory"],
    }
