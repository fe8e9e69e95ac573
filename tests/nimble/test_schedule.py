"""The schedule: segments between what torch runs, and the record that is written down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import networkx as nx
from mlsys_nimble.ir.operators import Aten, Input, Pointwise, Slice, Step
from mlsys_nimble.ir.program import Operator, Program, ValueType
from mlsys_nimble.planning.layout import lay_out
from mlsys_nimble.planning.planner import Assignment, Piece
from mlsys_nimble.planning.schedule import NOTHING, Schedule, Segment, segments_of
from mlsys_nimble.planning.storage import ancestors, dependencies, plan_storage

from tests.graph_checks import check_graph


def test_operators_go_into_the_first_stretch_that_has_what_they_need() -> None:
    # 0 and 1 native; torch runs 2 on 0's result; 3 needs 2, 4 needs 1 only, 5 (torch) needs 2, 6 needs 5.
    needed = [(), (), (0,), (2,), (1,), (2,), (5,)]
    first, second = segments_of(needed, frozenset({2, 5}), frozenset())
    assert first.operators == (0, 1, 4)
    assert first.then_torch == (2, 5)
    assert second.operators == (3, 6)
    assert second.then_torch == ()


def test_operators_in_place_are_in_no_segment() -> None:
    [only] = segments_of([(), (), (0,)], frozenset(), frozenset({1}))
    assert only.operators == (0, 2)


def test_segments_follow_the_longest_chain_of_torch_and_native_operators() -> None:
    # 0 torch, 1 native, 2 torch, 3 torch (reads 2), 4 native (reads 3 and 0), 5 in place (reads 4), 6 torch (reads 4).
    needed = [(), (0,), (1,), (2,), (0, 3), (4,), (4,)]
    found = segments_of(needed, frozenset({0, 2, 3, 6}), frozenset({5}))
    assert [(segment.operators, segment.then_torch) for segment in found] == [((), (0,)), ((1,), (2, 3)), ((4,), (6,))]
    assert all(segment.assignment == NOTHING for segment in found)


def test_without_operators_there_is_one_empty_stretch() -> None:
    assert segments_of([], frozenset(), frozenset()) == [Segment((), ())]
    assert segments_of([()], frozenset(), frozenset({0})) == [Segment((), ())]


def test_an_operator_in_place_makes_no_segment_of_its_own() -> None:
    # 1 looks at what torch made of 0, and nobody reads it.
    assert segments_of([(), (0,)], frozenset({0}), frozenset({1})) == [Segment((), (0,))]


def planned() -> Schedule:
    """x -> exp -> its second half, which torch runs -> doubled, which is the result; x itself is stored in a buffer."""
    row, half = ValueType((32,), "float32"), ValueType((16,), "float32")
    operators = (
        Operator("exp", Pointwise((Step("exp", (0,)),)), (0,), (1,)),
        Operator("half", Slice(0, 16), (1,), (2,)),
        Operator("sorted", Aten("aten.msort.default", (Input(0),)), (2,), (3,)),
        Operator("scaled", Pointwise((Step("mul", (0, 1)),)), (3, 5), (4,)),
    )
    program = Program((row, row, half, half, half, half), operators, (0,), (4,), {5: "a tensor"})
    layout = lay_out(program)
    needed = dependencies(layout)
    index = {operator.name: place for place, operator in enumerate(layout.program.operators)}
    found = segments_of(needed, frozenset({index["sorted"]}), layout.in_place)
    segments = []
    for segment in found:
        pieces = [[Piece(job, part, 2) for job in range(len(segment.operators))] for part in range(2)]
        if len(pieces[1]) > 1:
            pieces[1][1] = Piece(1, 1, 2, ((0, 1),))
        segments.append(replace(segment, assignment=Assignment(tuple(map(tuple, pieces)), 1.0)))
    return Schedule(layout, plan_storage(layout, ancestors(needed)), tuple(segments), {index["exp"]: 0.25})


def test_tasks_and_waits_are_counted_over_all_workers_and_stretches() -> None:
    schedule = planned()
    assert [segment.operators for segment in schedule.segments] == [(0,), (3, 4)]
    assert (schedule.num_tasks, schedule.num_waits) == (6, 1)


def test_the_record_says_where_everything_lies_and_who_runs_what() -> None:
    schedule = planned()
    record = json.loads(json.dumps(schedule.record()))
    names = [operator["name"] for operator in record["operators"]]
    assert names == ["exp", "half", "sorted", "scaled", "output0"]
    assert record["operators"][0] == {
        "name": "exp",
        "kind": "Pointwise",
        "inputs": ["%0"],
        "outputs": ["%1"],
        "in_place": False,
        "seconds": 0.25,
    }
    assert [operator["in_place"] for operator in record["operators"]] == [False, True, False, False, False]
    assert record["operators"][3]["seconds"] is None
    values = record["values"]
    assert {name: value["memory"] for name, value in values.items()} == {
        "%0": "caller",
        "%1": "arena",
        "%2": "arena",
        "%3": "arena",
        "%4": "arena",
        "%5": "constant",
        "%6": "caller",
    }
    assert values["%0"] == {"type": "float32[32]", "memory": "caller", "offset": 0, "strides": [4]}
    assert values["%1"]["offset"] == schedule.storage.offsets[1]
    assert values["%2"]["offset"] == schedule.storage.offsets[1] + 16 * 4, "the second half of what exp made"
    for name, place in zip(values, schedule.layout.places, strict=True):
        in_arena = schedule.storage.offsets.get(place.root, 0)
        assert values[name]["offset"] == in_arena + place.offset * 4
    assert record["arena_nbytes"] == schedule.storage.plan.peak_nbytes > 0
    whole = {"part": 0, "of": 2, "waits": []}
    assert record["stretches"] == [
        {
            "workers": [
                [{"operator": "exp", **whole}],
                [{"operator": "exp", **whole, "part": 1}],
            ],
            "then_torch": ["sorted"],
        },
        {
            "workers": [
                [{"operator": "scaled", **whole}, {"operator": "output0", **whole}],
                [
                    {"operator": "scaled", **whole, "part": 1},
                    {"operator": "output0", "part": 1, "of": 2, "waits": [{"worker": 0, "tasks_done": 1}]},
                ],
            ],
            "then_torch": [],
        },
    ]


def test_the_graph_says_who_runs_what_and_who_waits(tmp_path: Path) -> None:
    graph = planned().to_networkx()
    check_graph(graph, tmp_path)
    assert nx.get_node_attributes(graph, "workers") == {
        "exp": "0 1",
        "sorted": "torch",
        "scaled": "0 1",
        "output0": "0 1",
    }
    assert nx.get_node_attributes(graph, "seconds") == {"exp": 0.25}
    assert {(one, other): (data["nbytes"], data["synchronises"]) for one, other, data in graph.edges(data=True)} == {
        ("exp", "sorted"): (64, False),  # through a slice, which runs in place
        ("sorted", "scaled"): (64, False),
        ("scaled", "output0"): (64, True),
    }


def test_a_value_that_nothing_makes_is_not_in_the_record() -> None:
    row = ValueType((4,), "float32")
    program = Program((row, row, row), (Operator("exp", Pointwise((Step("exp", (0,)),)), (0,), (2,)),), (0,), (2,))
    layout = lay_out(program)
    schedule = Schedule(layout, plan_storage(layout, ancestors(dependencies(layout))), (), {})
    assert sorted(schedule.record()["values"]) == ["%0", "%2", "%3"]
