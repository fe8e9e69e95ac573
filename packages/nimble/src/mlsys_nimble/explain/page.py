"""One page about a model: its graph to zoom in, a real replay by worker, the critical path, what each pass changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsys_nimble.ir.graph import build_graph
from mlsys_nimble.planning.streams import StreamAssignment, assign_streams, plan_events

if TYPE_CHECKING:
    from mlsys_core.graphs import Graph

    from mlsys_nimble.backends.cpu.decisions import TaskTime
    from mlsys_nimble.explain import Explanation


@dataclass(frozen=True, slots=True)
class Link:
    """Task of the critical path, with the time that nobody worked on it before it began."""

    task: int  # index of the task
    waited_ns: int  # from the end of the task before it in the path (of the replay's begin) to its own begin


def critical_path(tasks: Sequence[TaskTime], needs: Mapping[str, Sequence[str]]) -> list[Link]:
    """Return the chain of tasks that ends last, from the first task on.

    Before each task stands the one that it waited for, which ended last: of the operators that it reads, of its
    worker's tasks before it, of its operator's other parts (one worker may have run both). The tasks' times and waits
    add up to the replay's time.

    Args:
        tasks: Tasks of one replay.
        needs: Names of the operators that each operator reads.

    Example:
        >>> from types import SimpleNamespace as T
        >>> a = T(operator="a", worker=0, begin_ns=0, end_ns=5)
        >>> b = T(operator="b", worker=1, begin_ns=6, end_ns=9)
        >>> critical_path([a, b], {"b": ["a"]})
        [Link(task=0, waited_ns=0), Link(task=1, waited_ns=1)]
    """
    if not tasks:
        return []
    of_operator: dict[str, list[int]] = {}
    of_worker: dict[int, list[int]] = {}
    for index in sorted(range(len(tasks)), key=lambda index: tasks[index].begin_ns):
        of_operator.setdefault(tasks[index].operator, []).append(index)
        of_worker.setdefault(tasks[index].worker, []).append(index)
    before = {index: previous for indices in of_worker.values() for previous, index in pairwise(indices)}
    start = min(task.begin_ns for task in tasks)
    current: int | None = max(range(len(tasks)), key=lambda index: tasks[index].end_ns)
    path: list[Link] = []
    while current is not None:
        begin = tasks[current].begin_ns
        operator = tasks[current].operator
        causes = [each for name in (operator, *needs.get(operator, ())) for each in of_operator.get(name, ())]
        causes += [before[current]] if current in before else []
        causes = [each for each in causes if tasks[each].end_ns <= begin and tasks[each].begin_ns < begin]
        cause = max(causes, key=lambda index: tasks[index].end_ns, default=None)
        path.append(Link(current, begin - (tasks[cause].end_ns if cause is not None else start)))
        current = cause
    return path[::-1]


def places(assignment: StreamAssignment) -> list[tuple[int, int]]:
    """Return the column and row of each operator.

    An operator's row is the number of operators in the longest chain before it. A stream stays in one column; two
    share one where the rows of the first end above those of the second.

    Example:
        >>> from mlsys_nimble.ir.graph import build_graph
        >>> from mlsys_nimble.planning.streams import assign_streams
        >>> edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]
        >>> sorted(places(assign_streams(build_graph(["a", "b", "c", "d"], edges))))
        [(0, 0), (0, 1), (0, 2), (1, 1)]
    """
    rows = [0] * len(assignment.graph.names)
    for producer, consumer in assignment.graph.edges:  # sorted by producer, and producers stand in order
        rows[consumer] = max(rows[consumer], rows[producer] + 1)
    ends: list[int] = []  # last row of each column so far
    column_of: dict[int, int] = {}
    spans = [[rows[operator] for operator in members] for members in assignment.streams()]
    for stream in sorted(range(len(spans)), key=lambda stream: min(spans[stream])):
        first, last = min(spans[stream]), max(spans[stream])
        column = next((index for index, end in enumerate(ends) if end < first), len(ends))
        ends[column : column + 1] = [last]
        column_of[stream] = column
    return [(column_of[stream], row) for stream, row in zip(assignment.stream_of, rows, strict=True)]


_TEMPLATE = Path(__file__).with_name("page.html")


def page(title: str, found: Explanation, replayed: Graph, tasks: Sequence[TaskTime]) -> str:
    """Return a page that needs nothing beside itself.

    Args:
        title: The model's name.
        found: What was decided without measured times.
        replayed: Operators that the replay runs; see :meth:`mlsys_nimble.planning.schedule.Schedule.to_networkx`.
        tasks: Times of one replay's tasks; their operators are nodes of ``replayed``.
    """
    data = json.dumps(page_data(found, replayed, tasks), separators=(",", ":")).replace("<", "\\u003c")
    return _TEMPLATE.read_text().replace("{{title}}", escape(title)).replace("{{data}}", data)


def page_data(found: Explanation, replayed: Graph, tasks: Sequence[TaskTime]) -> dict[str, Any]:
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
