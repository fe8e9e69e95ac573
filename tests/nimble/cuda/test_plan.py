"""Plans of streams and events: the paper's example to the letter, and every dependency of random graphs."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble import OperatorGraph, assign_streams, build_graph, plan_events
from mlsys_nimble.backends.cuda.plan import (
    ORIGIN,
    Record,
    Run,
    StreamPlan,
    Wait,
    ancestors,
    happens_before,
    plan_streams,
)
from mlsys_nimble.explain import explain
from torch import nn

from tests.graph_checks import check_graph


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 12) -> OperatorGraph:
    num_nodes = draw(st.integers(1, max_nodes))
    possible = list(combinations(range(num_nodes), 2))
    likely = draw(st.sampled_from([2, 4, 8]))
    kept = draw(st.lists(st.integers(0, likely), min_size=len(possible), max_size=len(possible)))
    edges = tuple(edge for edge, number in zip(possible, kept, strict=True) if number == 0)
    return OperatorGraph(tuple(f"op{i}" for i in range(num_nodes)), edges)


def ran_before_the_end(plan: StreamPlan, num_operators: int) -> int:
    """Return the operators that the origin has surely waited for after all commands."""
    ended = StreamPlan((*plan.commands, Run(num_operators, ORIGIN)), plan.num_streams, plan.num_events)
    return happens_before(ended, num_operators + 1)[-1]


@settings(max_examples=200)
@given(graphs(), st.sampled_from([1, 2, 3, 32]))
def test_every_dependency_is_ordered_and_every_stream_joins(graph: OperatorGraph, max_streams: int):
    plan = plan_streams(graph, max_streams=max_streams)
    count = len(graph.names)
    before = happens_before(plan, count)
    assert [command.operator for command in plan.commands if isinstance(command, Run)] == list(range(count))
    assert all(before[consumer] >> producer & 1 for producer, consumer in graph.edges)
    assert ran_before_the_end(plan, count) == (1 << count) - 1
    assert plan.num_streams <= max_streams
    assert {command.stream for command in plan.commands} == set(range(plan.num_streams))


@settings(max_examples=200)
@given(graphs())
def test_independent_operators_stay_independent_while_there_are_streams(graph: OperatorGraph):
    assert happens_before(plan_streams(graph), len(graph.names)) == ancestors(assign_streams(graph))


@given(graphs())
def test_streams_are_few_and_waits_no_more_than_theorem_3_and_forks_and_joins(graph: OperatorGraph):
    assignment = assign_streams(graph)
    plan = plan_streams(graph)
    assert assignment.degree <= plan.num_streams <= assignment.num_streams
    assert plan.num_waits <= len(plan_events(assignment)) + 2 * (plan.num_streams - 1)


@given(graphs())
def test_a_capture_could_be_made_of_it(graph: OperatorGraph):
    """A stream is used only when forked from the origin; events are waited for after they are recorded, once each."""
    plan = plan_streams(graph)
    captured, recorded = {ORIGIN}, set()
    for command in plan.commands:
        match command:
            case Run(_, stream):
                assert stream in captured
            case Record(event, stream):
                assert stream in captured
                assert event not in recorded
                recorded.add(event)
            case Wait(event, stream):
                assert event in recorded
                captured.add(stream)
    assert len(recorded) == plan.num_events


@given(graphs())
def test_one_stream_has_no_events(graph: OperatorGraph):
    plan = plan_streams(graph, use_multi_stream=False)
    assert plan.commands == tuple(Run(index, ORIGIN) for index in range(len(graph.names)))


def test_a_walk_through_as_in_figure_3_7():
    """Seven operators; v1 feeds three branches, two of which meet, and all meet at the end."""
    edges = [
        ("v1", "v2"),
        ("v1", "v3"),
        ("v1", "v4"),
        ("v2", "v5"),
        ("v3", "v5"),
        ("v4", "v6"),
        ("v5", "v7"),
        ("v6", "v7"),
    ]
    graph = build_graph([f"v{i}" for i in range(1, 8)], edges)
    assignment = assign_streams(graph)
    plan = plan_streams(graph)
    assert assignment.degree == plan.num_streams == 3
    waits = [command for command in plan.commands if isinstance(command, Wait)]
    assert len(waits) == len(plan_events(assignment)) == 4  # |E'| - |M|: no fork, as all begin with v1, and no join
    text = [str(command) for command in plan.commands]
    order = {
        name: text.index(f"Run(operator={i}, stream={assignment.stream_of[i]})") for i, name in enumerate(graph.names)
    }
    assert sorted(order, key=order.__getitem__) == list(graph.names)


@pytest.mark.parametrize("width", [40, 100])
def test_more_branches_than_streams_share_them(width: int):
    names = ["in", *(f"b{i}" for i in range(width)), "out"]
    graph = build_graph(names, [edge for i in range(width) for edge in (("in", f"b{i}"), (f"b{i}", "out"))])
    assert plan_streams(graph).num_streams == 32
    chain = build_graph(names, list(pairwise(names)))
    assert plan_streams(chain).num_streams == 1


@given(graphs(), st.sampled_from([1, 2, 32]))
def test_the_graph_has_each_operators_stream_and_each_wait(graph: OperatorGraph, max_streams: int):
    plan = plan_streams(graph, max_streams=max_streams)
    drawn = plan.to_networkx(graph.to_networkx())
    stream_of = {graph.names[run.operator]: run.stream for run in plan.commands if isinstance(run, Run)}
    assert nx.get_node_attributes(drawn, "stream") == stream_of
    needed = {(graph.names[producer], graph.names[consumer]) for producer, consumer in assign_streams(graph).meg_edges}
    assert {(one, other): waits for one, other, waits in drawn.edges(data="synchronises")} == {
        (one, other): (one, other) in needed and stream_of[one] != stream_of[other]
        for one, other in graph.to_networkx().edges
    }


def test_a_programs_graph_keeps_its_attributes(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    program = explain(model, (torch.zeros(1, 4),)).program
    drawn = plan_streams(program.graph()).to_networkx(program.to_networkx())
    check_graph(drawn, tmp_path)
    node, (*_, edge) = drawn.nodes[program.operators[-1].name], list(drawn.edges(data=True))[-1]
    assert {*node} == {"kind", "shape", "dtype", "nbytes", "source", "stream"}
    assert {*edge} == {"nbytes", "synchronises"}
