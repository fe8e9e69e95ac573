"""Commands for CUDA, planned ahead of time: operators on streams, events between them (sections 3.3.1 and 3.3.2).

Follows :mod:`mlsys_nimble.planning.streams` and :mod:`mlsys_nimble.planning.streams`, before the executor. Pure. The
streams of Algorithm 1 are folded onto few queues of CUDA: a stream takes a queue in which everything has run before,
so no two independent operators wait for each other while there are enough queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mlsys_core.graphs import Graph, new_graph
from mlsys_nimble.ir.graph import OperatorGraph
from mlsys_nimble.planning.streams import Bits, StreamAssignment, assign_streams, plan_events

ORIGIN = 0  # the stream that a capture begins and ends on
MAX_STREAMS = 32  # size of torch's pool of streams


@dataclass(frozen=True, slots=True)
class Run:
    """Command to run an operator on a stream."""

    operator: int
    stream: int


@dataclass(frozen=True, slots=True)
class Record:
    """Command to record an event after all work on a stream so far; each event is recorded once."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Command to hold later work on a stream until an event has passed."""

    event: int
    stream: int


Command: TypeAlias = Run | Record | Wait


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Commands of a replay, in a valid order of submission."""

    commands: tuple[Command, ...]
    num_streams: int
    num_events: int

    @property
    def num_waits(self) -> int:
        """Return the number of waits: between operators, and those that fork from the origin and join it."""
        return sum(isinstance(command, Wait) for command in self.commands)

    def to_networkx(self, operators: Graph) -> Graph:
        """Return the operators with the streams of CUDA that run them.

        Nodes gain ``stream``; edges gain ``synchronises``: the consumer's stream waits for an event of the producer's.

        Args:
            operators: The graph that was planned, its nodes in the order of their indices: what
                :meth:`mlsys_nimble.ir.graph.OperatorGraph.to_networkx` gives of it, or the same of a program.
        """
        title = "streams of CUDA; dashed: one waits for the other"
        graph = new_graph(title, column="stream", color="stream", dashed="synchronises")
        graph.add_nodes_from(operators.nodes(data=True))
        graph.add_edges_from(operators.edges(data=True), synchronises=False)
        names = list(operators)
        last: dict[int, str] = {}  # by stream: its last operator
        event_of: dict[int, str | None] = {}  # by event: the operator before it; None: the fork from the origin
        awaited: dict[int, list[str | None]] = {}  # by stream: operators that its next one waits for
        for command in self.commands:
            match command:
                case Run(operator, stream):
                    name = last[stream] = names[operator]
                    graph.nodes[name]["stream"] = stream
                    for producer in filter(None, awaited.pop(stream, ())):
                        graph.edges[producer, name]["synchronises"] = True
                case Record(event, stream):
                    event_of[event] = last.get(stream)
                case Wait(event, stream):
                    awaited.setdefault(stream, []).append(event_of[event])
        return graph


def plan_streams(graph: OperatorGraph, *, use_multi_stream: bool = True, max_streams: int = MAX_STREAMS) -> StreamPlan:
    """Plan commands that run each operator of a graph once, after all that it depends on.

    Stream capture demands that every other stream forks from the origin before its first operator and joins it at the
    end.

    Example:
        >>> from mlsys_nimble.ir.graph import build_graph
        >>> join = build_graph(["a", "b", "join"], [("a", "join"), ("b", "join")])
        >>> for command in plan_streams(join).commands:
        ...     print(command)
        Record(event=0, stream=0)
        Run(operator=0, stream=0)
        Wait(event=0, stream=1)
        Run(operator=1, stream=1)
        Record(event=1, stream=1)
        Wait(event=1, stream=0)
        Run(operator=2, stream=0)
    """
    if not use_multi_stream:
        return StreamPlan(tuple(Run(operator, ORIGIN) for operator in range(len(graph.names))), 1, 0)
    assignment = assign_streams(graph)
    stream_of = fold_streams(assignment, max_streams=max_streams)
    writer = _Writer(stream_of)
    waits: dict[int, list[int]] = {}
    recorded: set[int] = set()
    for event in plan_events(assignment):
        if stream_of[event.producer] != stream_of[event.consumer]:
            waits.setdefault(event.consumer, []).append(event.producer)
            recorded.add(event.producer)
    for operator in range(len(graph.names)):
        writer.run(operator, waits.get(operator, ()), is_waited_for=operator in recorded)
    has_reader = {producer for producer, _ in assignment.meg_edges}
    writer.join([operator for operator in range(len(graph.names)) if operator not in has_reader])
    return StreamPlan(tuple(writer.commands), 1 + max(stream_of, default=0), writer.num_events)


class _Writer:
    """Writer of the commands, in order of submission."""

    def __init__(self, stream_of: Sequence[int]) -> None:
        self.commands: list[Command] = []
        self.num_events = 0
        self._stream_of = stream_of
        self._event_after: dict[int, int] = {}
        self._begun = {ORIGIN}
        if any(stream != ORIGIN for stream in stream_of):
            self._fork = self._record(ORIGIN)

    def run(self, operator: int, producers: Sequence[int], *, is_waited_for: bool) -> None:
        stream = self._stream_of[operator]
        if stream not in self._begun:
            self._begun.add(stream)
            if not producers:  # otherwise its waits make it part of the capture
                self.commands.append(Wait(self._fork, stream))
        self.commands += [Wait(self._event_after[producer], stream) for producer in producers]
        self.commands.append(Run(operator, stream))
        if is_waited_for:
            self._event_after[operator] = self._record(stream)

    def join(self, last: Sequence[int]) -> None:
        """Make the origin wait for operators that no other operator waits for."""
        streams = dict.fromkeys(self._stream_of[operator] for operator in last)
        for stream in streams:
            if stream != ORIGIN:
                self.commands.append(Wait(self._record(stream), ORIGIN))

    def _record(self, stream: int) -> int:
        self.commands.append(Record(self.num_events, stream))
        self.num_events += 1
        return self.num_events - 1


def fold_streams(assignment: StreamAssignment, *, max_streams: int) -> tuple[int, ...]:
    """Return a queue for each operator: Algorithm 1's streams on as few queues as independence allows.

    A stream takes a queue whose operators all run before its first one, or opens a new queue. If neither is possible,
    it takes the queue whose last operator is earliest, which costs concurrency but no correctness.
    """
    before = ancestors(assignment)
    queue_of: dict[int, int] = {}  # queue by stream
    last_of: list[int] = []  # by queue: last operator of its last stream
    for stream, members in enumerate(assignment.streams()):  # ordered by first operator
        free = [queue for queue, last in enumerate(last_of) if before[members[0]] >> last & 1]
        if not free and len(last_of) < max_streams:
            last_of.append(members[-1])
            queue_of[stream] = len(last_of) - 1
            continue
        queue = max(free, key=last_of.__getitem__) if free else min(range(len(last_of)), key=last_of.__getitem__)
        queue_of[stream] = queue
        last_of[queue] = max(last_of[queue], members[-1])
    return tuple(queue_of[stream] for stream in assignment.stream_of)


def ancestors(assignment: StreamAssignment) -> list[Bits]:
    """Return for each operator all that it depends on, directly or through others."""
    before: list[Bits] = [0] * len(assignment.graph.names)
    for producer, consumer in assignment.meg_edges:  # sorted by producer, which is complete by then
        before[consumer] |= before[producer] | 1 << producer
    return before


def happens_before(plan: StreamPlan, num_operators: int) -> list[Bits]:
    """Return for each operator those that have surely run when it begins, by stream order and events alone.

    It depends on the commands alone, not on the graph: memory is planned by it, and tests compare it with the graph's
    dependencies.
    """
    on_stream: list[Bits] = [0] * plan.num_streams
    at_event: list[Bits] = [0] * plan.num_events
    before: list[Bits] = [0] * num_operators
    for command in plan.commands:
        match command:
            case Run(operator, stream):
                before[operator] = on_stream[stream]
                on_stream[stream] |= 1 << operator
            case Record(event, stream):
                at_event[event] = on_stream[stream]
            case Wait(event, stream):
                on_stream[stream] |= at_event[event]
    return before
