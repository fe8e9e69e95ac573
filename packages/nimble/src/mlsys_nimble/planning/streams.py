"""Stream assignment and its synchronisations: Algorithm 1 of Nimble (dissertation, section 3.3.2, appendix A.1).

Pure: an operator graph in, a stream for each operator and the |E'| - |M| events of Theorem 3 out. The assignment
reaches maximum logical concurrency (independent operators never share a stream) with the fewest synchronisations
possible. An executor records each event on the producer's stream right after the producer, and makes the consumer's
stream wait for it right before the consumer.

Sets of operators are Python integers, one bit an operator: reachability takes n²/8 bytes, and an edge one OR of rows.
The minimum equivalent graph of 10,000 operators takes 0.1 s so; ``networkx.transitive_reduction`` takes 1.4 s with
30,000 edges and 11 s with 100,000. The degree of concurrency is a matching of the transitive closure: only bitsets can
hold that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlsys_core.errors import InvalidInputError
from mlsys_core.graphs import Graph, new_graph

from mlsys_nimble.ir.graph import Edge, OperatorGraph

MAX_OPERATORS = 50_000  # reachability then takes 0.3 GB

Bits = int  # a set of operators: bit i stands for operator i


@dataclass(frozen=True, slots=True)
class MinimumEquivalentGraph:
    """Smallest set of edges with the reachability of the original graph; unique for a DAG."""

    edges: tuple[Edge, ...]  # E', sorted
    reachable: tuple[Bits, ...]  # by operator: its descendants, without itself


@dataclass(frozen=True, slots=True)
class StreamAssignment:
    """Stream of each operator, and the graph and matching that it was derived from."""

    graph: OperatorGraph
    meg_edges: tuple[Edge, ...]  # E' of the minimum equivalent graph, sorted
    matching: tuple[Edge, ...]  # M, a maximum matching: the edges of E' that stay within a stream, sorted
    stream_of: tuple[int, ...]  # stream of each operator, by index; streams are numbered by their first operator
    degree: int  # degree of logical concurrency: size of the largest set of independent operators

    @property
    def num_streams(self) -> int:
        """Return |V| - |M|: at least ``degree``, more where a chain cover would have to skip an operator."""
        return len(self.graph.names) - len(self.matching)

    def streams(self) -> list[list[int]]:
        """Return the operators of each stream, in the order in which it runs them."""
        members: list[list[int]] = [[] for _ in range(self.num_streams)]
        for operator, stream in enumerate(self.stream_of):
            members[stream].append(operator)
        return members

    def to_networkx(self, operators: Graph | None = None) -> Graph:
        """Return the operators with their streams.

        Nodes gain ``stream``. Edges gain ``synchronises`` (the consumer's stream waits for the producer's) and
        ``is_redundant`` (not in the minimum equivalent graph: a longer path says the same).

        Args:
            operators: A graph of these operators, and perhaps more, to take nodes, edges and attributes from; None: the
                operators' names and dependencies.
        """
        names, graph = (
            self.graph.names,
            new_graph(
                "streams; dashed: one waits for the other",
                column="stream",
                color="stream",
                dashed="synchronises",
                hidden="is_redundant",
            ),
        )
        known = self.graph.to_networkx() if operators is None else operators.subgraph(names)
        graph.add_nodes_from(known.nodes(data=True))
        for name, stream in zip(names, self.stream_of, strict=True):
            graph.nodes[name]["stream"] = stream
        kept = {(names[producer], names[consumer]) for producer, consumer in self.meg_edges}
        for one, other, attributes in known.edges(data=True):
            is_kept = (one, other) in kept
            crosses = graph.nodes[one]["stream"] != graph.nodes[other]["stream"]
            graph.add_edge(one, other, **attributes, synchronises=is_kept and crosses, is_redundant=not is_kept)
        return graph


def assign_streams(graph: OperatorGraph) -> StreamAssignment:
    """Assign a stream to each operator by Algorithm 1.

    Raises:
        InvalidInputError: more than ``MAX_OPERATORS`` operators.

    Example:
        >>> from mlsys_nimble.ir.graph import build_graph
        >>> diamond = build_graph(["a", "b", "c", "d"], [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])
        >>> assign_streams(diamond).stream_of
        (0, 0, 1, 0)
    """
    num_operators = len(graph.names)
    meg = minimum_equivalent_graph(graph)  # step 1
    consumers: list[Bits] = [0] * num_operators  # step 2: the bipartite graph, as the y_j adjacent to each x_i
    for producer, consumer in meg.edges:
        consumers[producer] |= 1 << consumer
    producer_of = maximum_matching(consumers)  # step 3
    stream_of: list[int] = []  # steps 4 and 5: matched pairs form paths, and a path is a stream
    num_streams = 0
    for producer_or_none in producer_of:  # topological order: the producer has its stream
        if producer_or_none is None:
            stream_of.append(num_streams)
            num_streams += 1
        else:
            stream_of.append(stream_of[producer_or_none])
    # By Dilworth's theorem the largest set of pairwise independent operators is as large as the smallest cover by
    # chains, and that is a maximum matching of the transitive closure (Fulkerson); the one just found is a good start.
    chained = maximum_matching(meg.reachable, start=producer_of)
    return StreamAssignment(
        graph=graph,
        meg_edges=meg.edges,
        matching=tuple(sorted((p, consumer) for consumer, p in enumerate(producer_of) if p is not None)),
        stream_of=tuple(stream_of),
        degree=chained.count(None),
    )


def minimum_equivalent_graph(graph: OperatorGraph) -> MinimumEquivalentGraph:
    """Drop each edge that a longer path makes redundant: step 1 of Algorithm 1.

    Raises:
        InvalidInputError: more than ``MAX_OPERATORS`` operators.
    """
    num_operators = len(graph.names)
    if num_operators > MAX_OPERATORS:
        raise InvalidInputError(
            f"the graph has {num_operators} operators; at most {MAX_OPERATORS} are taken, so schedule it in parts"
        )
    successors = graph.successors()
    reachable: list[Bits] = [0] * num_operators
    kept: list[Edge] = []
    for operator in reversed(range(num_operators)):
        reached = 0
        for consumer in successors[operator]:  # ascending: operators that lead to a consumer come before it
            if not reached >> consumer & 1:
                kept.append((operator, consumer))
                reached |= reachable[consumer] | 1 << consumer
        reachable[operator] = reached
    return MinimumEquivalentGraph(edges=tuple(sorted(kept)), reachable=tuple(reachable))


def maximum_matching(adjacent: Sequence[Bits], *, start: Sequence[int | None] | None = None) -> list[int | None]:
    """Find a maximum matching of a bipartite graph by augmenting paths (Ford-Fulkerson in appendix A.1.4).

    Args:
        adjacent: Right vertices that each left vertex may be matched to; as many right as left vertices.
        start: Matching to begin from, in the form of the result.

    Returns:
        For each right vertex the left vertex matched to it, or None.
    """
    left_of: list[int | None] = list(start) if start is not None else [None] * len(adjacent)
    right_of: dict[int, int] = {left: right for right, left in enumerate(left_of) if left is not None}
    free = sum(1 << right for right, left in enumerate(left_of) if left is None)
    exhausted = 0  # right vertices seen in a search that failed: no augmenting path can go through them any more
    for root in range(len(adjacent)):
        if root in right_of:
            continue
        visited = exhausted
        reached_from: dict[int, int] = {}
        frontier = deque([root])
        end: int | None = None
        while frontier:
            left = frontier.popleft()
            fresh = adjacent[left] & ~visited
            if open_end := fresh & free:
                end = (open_end & -open_end).bit_length() - 1
                reached_from[end] = left
                break
            visited |= fresh
            for right in _members(fresh):
                reached_from[right] = left
                matched = left_of[right]
                assert matched is not None  # a vertex without a match is in `free`
                frontier.append(matched)
        if end is None:
            exhausted = visited
            continue
        free ^= 1 << end
        tail: int | None = end
        while tail is not None:  # flip the path, from its end back to the root
            left = reached_from[tail]
            left_of[tail], before = left, right_of.get(left)
            right_of[left], tail = tail, before
    return left_of


def _members(bits: Bits) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


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
