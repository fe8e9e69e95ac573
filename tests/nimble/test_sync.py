"""The events of a stream assignment make every dependency hold."""

from __future__ import annotations

from itertools import combinations, pairwise

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble import OperatorGraph, assign_streams, plan_events


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
