"""Algorithm 1 and its events against brute force: Theorems 1 to 4, and the degree of concurrency."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_nimble import OperatorGraph, assign_streams, build_graph, plan_events
from mlsys_nimble.planning import streams
from mlsys_nimble.planning.streams import maximum_matching, minimum_equivalent_graph

Edge = tuple[int, int]


def graph_of(num_nodes: int, edges: set[Edge]) -> OperatorGraph:
    return OperatorGraph(tuple(f"op{i}" for i in range(num_nodes)), tuple(sorted(edges)))


def digraph_of(graph: OperatorGraph) -> nx.DiGraph:
    digraph = nx.DiGraph(graph.edges)
    digraph.add_nodes_from(range(len(graph.names)))
    return digraph


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 8) -> OperatorGraph:
    num_nodes = draw(st.integers(1, max_nodes))
    possible = list(combinations(range(num_nodes), 2))
    kept = draw(st.lists(st.booleans(), min_size=len(possible), max_size=len(possible)))
    return graph_of(num_nodes, {edge for edge, keep in zip(possible, kept, strict=True) if keep})


def maximally_concurrent_assignments(num_nodes: int, dependent: set[Edge]) -> Iterator[list[int]]:
    """Every partition of the nodes in which nodes of one stream depend on each other pairwise."""

    def extend(stream_of: list[int]) -> Iterator[list[int]]:
        node = len(stream_of)
        if node == num_nodes:
            yield list(stream_of)
            return
        for stream in range(max(stream_of, default=-1) + 2):
            if all((other, node) in dependent for other in range(node) if stream_of[other] == stream):
                yield from extend([*stream_of, stream])

    return extend([])


def is_safe(plan: set[Edge], stream_of: list[int], digraph: nx.DiGraph) -> bool:
    """Definition 2: each edge stays within a stream, or some path between its ends is synchronised."""
    return all(
        stream_of[u] == stream_of[v] or any(plan & set(pairwise(path)) for path in nx.all_simple_paths(digraph, u, v))
        for u, v in digraph.edges
    )


@settings(max_examples=80)
@given(graphs())
def test_independent_operators_never_share_a_stream(graph: OperatorGraph):
    dependent = set(nx.transitive_closure(digraph_of(graph)).edges)
    stream_of = assign_streams(graph).stream_of
    for pair in combinations(range(len(graph.names)), 2):
        assert pair in dependent or stream_of[pair[0]] != stream_of[pair[1]]


@settings(max_examples=25)
@given(graphs())
def test_no_assignment_has_fewer_synchronisations(graph: OperatorGraph):
    reduced = set(nx.transitive_reduction(digraph_of(graph)).edges)
    dependent = set(nx.transitive_closure(digraph_of(graph)).edges)
    # Lemma 4: an assignment of maximum concurrency needs the edges of the minimum equivalent graph that cross streams.
    fewest = min(
        sum(stream_of[u] != stream_of[v] for u, v in reduced)
        for stream_of in maximally_concurrent_assignments(len(graph.names), dependent)
    )
    assert len(plan_events(assign_streams(graph))) == fewest


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_theorem_4_from_the_definitions_alone(num_nodes: int):
    """Every DAG: no assignment of maximum concurrency has a safe plan smaller than ours, and ours is safe."""
    possible = list(combinations(range(num_nodes), 2))
    for size in range(len(possible) + 1):
        for edges in combinations(possible, size):
            graph = graph_of(num_nodes, set(edges))
            digraph = digraph_of(graph)
            assignment = assign_streams(graph)
            plan = {(event.producer, event.consumer) for event in plan_events(assignment)}
            assert is_safe(plan, list(assignment.stream_of), digraph)
            dependent = set(nx.transitive_closure(digraph).edges)
            for stream_of in maximally_concurrent_assignments(num_nodes, dependent):
                for smaller in (
                    combinations(edges, len(plan) - 1) if plan else ()
                ):  # a subset of a plan that fails, fails
                    assert not is_safe(set(smaller), stream_of, digraph)


@settings(max_examples=80)
@given(graphs())
def test_minimum_equivalent_graph_is_the_transitive_reduction(graph: OperatorGraph):
    meg = minimum_equivalent_graph(graph)
    assert set(meg.edges) == set(nx.transitive_reduction(digraph_of(graph)).edges)
    closure = {(u, v) for u, reached in enumerate(meg.reachable) for v in range(len(graph.names)) if reached >> v & 1}
    assert closure == set(nx.transitive_closure(digraph_of(graph)).edges)


@settings(max_examples=80)
@given(graphs())
def test_degree_is_the_largest_set_of_independent_operators(graph: OperatorGraph):
    dependent = set(nx.transitive_closure(digraph_of(graph)).edges)
    nodes = range(len(graph.names))
    largest = max(
        size
        for size in range(1, len(nodes) + 1)
        for chosen in combinations(nodes, size)
        if not any(pair in dependent for pair in combinations(chosen, 2))
    )
    assignment = assign_streams(graph)
    assert assignment.degree == largest
    assert assignment.num_streams >= largest


@settings(max_examples=80)
@given(
    st.integers(1, 9).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1), max_size=3), min_size=n, max_size=n))
)
def test_matching_is_one_and_maximum(neighbours: list[set[int]]):
    adjacent = [sum(1 << right for right in rights) for rights in neighbours]
    matched = maximum_matching(adjacent)
    pairs = [(left, right) for right, left in enumerate(matched) if left is not None]
    assert len({left for left, _ in pairs}) == len(pairs)
    assert all(adjacent[left] >> right & 1 for left, right in pairs)
    size = len(adjacent)
    bipartite = nx.Graph()
    bipartite.add_nodes_from(range(2 * size))
    bipartite.add_edges_from((u, size + v) for u in range(size) for v in range(size) if adjacent[u] >> v & 1)
    reference = nx.bipartite.hopcroft_karp_matching(bipartite, range(size))
    assert len(pairs) == len(reference) // 2


def test_worked_example():
    """The walk-through of the five steps on a graph worked by hand (the paper's own example is only drawn)."""
    edges = ["ab", "ac", "ad", "bd", "cd", "ce", "cf", "df", "ef", "fg"]  # ad and cf are redundant
    graph = build_graph(list("abcdefg"), [(edge[0], edge[1]) for edge in edges])
    assignment = assign_streams(graph)

    def named(pairs: Iterator[Edge]) -> list[str]:
        return [graph.names[u] + graph.names[v] for u, v in pairs]

    assert named(iter(assignment.meg_edges)) == ["ab", "ac", "bd", "cd", "ce", "df", "ef", "fg"]
    assert named(iter(assignment.matching)) == ["ab", "bd", "ce", "df", "fg"]
    assert [[graph.names[i] for i in stream] for stream in assignment.streams()] == [list("abdfg"), list("ce")]
    assert named((event.producer, event.consumer) for event in plan_events(assignment)) == ["ac", "cd", "ef"]
    assert assignment.degree == 2


def test_a_hub_takes_more_streams_than_the_degree():
    hub = build_graph(["a", "b", "hub", "c", "d"], [("a", "hub"), ("b", "hub"), ("hub", "c"), ("hub", "d")])
    assignment = assign_streams(hub)
    assert (assignment.num_streams, assignment.degree) == (3, 2)


@given(
    st.integers(1, 8).flatmap(lambda n: st.lists(st.sets(st.integers(0, n - 1), max_size=3), min_size=n, max_size=n)),
    st.randoms(use_true_random=False),
)
def test_a_matching_that_is_begun_is_made_maximum(neighbours: list[set[int]], rng: random.Random):
    adjacent = [sum(1 << right for right in rights) for rights in neighbours]
    start: list[int | None] = [None] * len(adjacent)
    for left, rights in enumerate(neighbours):  # greedy, and not always
        open_ends = [right for right in rights if start[right] is None]
        if open_ends and rng.random() < 0.6:
            start[rng.choice(open_ends)] = left
    given_start = list(start)
    matched = maximum_matching(adjacent, start=start)
    pairs = [(left, right) for right, left in enumerate(matched) if left is not None]
    assert start == given_start, "what was given is not changed"
    assert len({left for left, _ in pairs}) == len(pairs)
    assert all(adjacent[left] >> right & 1 for left, right in pairs)
    assert len(pairs) == sum(left is not None for left in maximum_matching(adjacent))
    assert {right for right, left in enumerate(start) if left is not None} <= {right for _, right in pairs}


def test_the_first_of_several_matches_is_taken_and_moved_only_if_it_must():
    assert maximum_matching([0b111, 0b110, 0b100]) == [0, 1, 2]
    assert maximum_matching([0b011, 0b001]) == [1, 0], "the second left vertex has the first right one alone"
    assert maximum_matching([0b011, 0b011, 0b011]) == [0, 1, None]
    assert maximum_matching([0b000, 0b001, 0b001]) == [1, None, None]
    assert maximum_matching([]) == []


def test_streams_are_numbered_by_their_first_operator():
    graph = build_graph(list("abcdef"), [("a", "c"), ("b", "d"), ("c", "e"), ("d", "e")])
    assignment = assign_streams(graph)
    assert graph.names == tuple("abcdef")
    assert assignment.stream_of == (0, 1, 0, 1, 0, 2)
    assert assignment.streams() == [[0, 2, 4], [1, 3], [5]]
    assert (assignment.num_streams, assignment.degree) == (3, 3)
    assert assignment.matching == ((0, 2), (1, 3), (2, 4))
    assert [(event.producer, event.consumer) for event in plan_events(assignment)] == [(3, 4)]
    assert plan_events(assignment)[0].producer_stream == 1
    assert plan_events(assignment)[0].consumer_stream == 0


@pytest.mark.parametrize("decide", [assign_streams, minimum_equivalent_graph])
def test_too_many_operators_are_refused(decide: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "MAX_OPERATORS", 5)
    decide(graph_of(5, {(0, 1)}))
    with pytest.raises(InvalidInputError, match="the graph has 6 operators; at most 5 are taken, so schedule it in"):
        decide(graph_of(6, set()))


@settings(max_examples=80)
@given(st.integers(1, 9), st.randoms(use_true_random=False))
def test_stream_order_and_events_imply_every_edge_and_none_is_spare(num_nodes: int, rng):
    edges = tuple(edge for edge in combinations(range(num_nodes), 2) if rng.random() < 0.4)
    assignment = assign_streams(OperatorGraph(tuple(f"op{i}" for i in range(num_nodes)), edges))
    events = plan_events(assignment)
    in_order = [pair for stream in assignment.streams() for pair in pairwise(stream)]

    def enforced(pairs: list[tuple[int, int]]) -> set[tuple[int, int]]:
        digraph = nx.DiGraph(in_order + pairs)
        digraph.add_nodes_from(range(num_nodes))
        return set(nx.transitive_closure(digraph).edges)

    pairs = [(event.producer, event.consumer) for event in events]
    assert set(edges) <= enforced(pairs)
    for spare in pairs:
        assert not set(edges) <= enforced([pair for pair in pairs if pair != spare])
    for event in events:
        assert event.producer_stream == assignment.stream_of[event.producer]
        assert event.consumer_stream == assignment.stream_of[event.consumer]
        assert event.producer_stream != event.consumer_stream
    assert len(events) == len(assignment.meg_edges) - len(assignment.matching)
