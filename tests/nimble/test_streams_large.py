"""Algorithm 1 on graphs of real size."""

from __future__ import annotations

import random

import networkx as nx
from mlsys_nimble import assign_streams, plan_events

from tests.nimble.test_streams import digraph_of, graph_of


def test_long_fence_of_operators():
    """Its augmenting paths run through every operator; a recursive search would overflow here."""
    half = 3000
    edges = {(i, half + i) for i in range(half)} | {(i, half + i + 1) for i in range(half - 1)}
    assignment = assign_streams(graph_of(2 * half, edges))
    assert (assignment.num_streams, assignment.degree) == (half, half)


def test_ten_thousand_operators():
    rng = random.Random(7)
    edges = {tuple(sorted(rng.sample(range(10_000), 2))) for _ in range(30_000)}
    graph = graph_of(10_000, edges)
    assignment = assign_streams(graph)
    reduced = nx.transitive_reduction(digraph_of(graph))
    assert set(assignment.meg_edges) == set(reduced.edges)
    assert len(plan_events(assignment)) == len(assignment.meg_edges) - len(assignment.matching)
