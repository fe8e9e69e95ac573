"""Synchronisations of a stream assignment: the |E'| - |M| events of Theorem 3.

Follows :mod:`mlsys_nimble.planning.streams`; an executor records each event on the producer's stream right after the
producer and makes the consumer's stream wait for it right before the consumer.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlsys_nimble.planning.streams import StreamAssignment


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """Event for which the consumer's stream waits until the producer has run."""

    producer: int  # operator after which the event is recorded
    consumer: int  # operator before which the stream waits
    producer_stream: int
    consumer_stream: int  # never the producer's


def plan_events(assignment: StreamAssignment) -> tuple[SyncEvent, ...]:
    """Plan one event for each edge of the minimum equivalent graph that crosses streams, by producer and consumer.

    This is a safe synchronisation plan, and no assignment of maximum logical concurrency has a smaller one (Theorem 4).

    Example:
        >>> from mlsys_nimble.ir.graph import build_graph
        >>> from mlsys_nimble.planning.streams import assign_streams
        >>> join = build_graph(["a", "b", "join"], [("a", "join"), ("b", "join")])
        >>> [(event.producer, event.consumer) for event in plan_events(assign_streams(join))]
        [(1, 2)]
    """
    stream_of = assignment.stream_of
    return tuple(
        SyncEvent(producer, consumer, stream_of[producer], stream_of[consumer])
        for producer, consumer in assignment.meg_edges
        if stream_of[producer] != stream_of[consumer]
    )
