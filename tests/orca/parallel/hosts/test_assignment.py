"""Parts over nodes: everyone has a part, stages go first, a stage's ranks stay together, and none is lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.parallel.hosts.assignment import assign, parts_of
from mlsys_orca.parallel.placement import all_places


def nodes_of(ranks: int, stages: int, replicas: int, nodes: int) -> list[int]:
    found = assign(tensor_parallel=ranks, pipeline_parallel=stages, num_replicas=replicas, num_nodes=nodes)
    return list(found.values())


@pytest.mark.parametrize(
    ("ranks", "stages", "replicas", "nodes", "expected"),
    [
        (2, 1, 1, 2, [0, 1]),
        (1, 2, 1, 2, [0, 1]),
        (2, 2, 1, 2, [0, 0, 1, 1]),
        (2, 2, 1, 4, [0, 1, 2, 3]),
        (4, 2, 1, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
        (1, 4, 1, 2, [0, 0, 1, 1]),
        (1, 2, 3, 2, [0, 0, 1, 1, 0, 0]),
        (1, 2, 2, 4, [0, 1, 2, 3]),
        (1, 2, 2, 3, [0, 0, 1, 2]),
        (2, 1, 1, 1, [0, 0]),
    ],
)
def test_stages_first_then_ranks_and_replicas(
    ranks: int, stages: int, replicas: int, nodes: int, expected: list[int]
) -> None:
    assert nodes_of(ranks, stages, replicas, nodes) == expected


@given(st.sampled_from([1, 2, 3, 4]), st.integers(1, 6), st.integers(1, 5), st.integers(1, 40))
def test_every_part_has_a_node_and_every_node_a_part_or_it_is_refused(
    ranks: int, stages: int, replicas: int, nodes: int
) -> None:
    try:
        found = assign(tensor_parallel=ranks, pipeline_parallel=stages, num_replicas=replicas, num_nodes=nodes)
    except InvalidInputError:
        assert nodes > ranks * stages * replicas
        return
    places = all_places(tensor_parallel=ranks, pipeline_parallel=stages)
    assert set(found) == {(replica, place) for replica in range(replicas) for place in places}
    assert set(found.values()) == set(range(nodes))
    counted = Counter(found.values())
    assert sum(counted.values()) == ranks * stages * replicas
    own = [parts_of(found, node) for node in range(nodes)]
    assert sum(len(of) for parts in own for of in parts.values()) == ranks * stages * replicas
    for replica in range(replicas):
        of_replica = {found[replica, place] for place in places}
        if replicas >= nodes:
            assert of_replica == {replica % nodes}
        if len(of_replica) <= stages:
            for stage in range(stages):
                assert len({found[replica, place] for place in places if place.stage == stage}) == 1


def test_too_many_nodes_are_refused_with_the_number_that_fits() -> None:
    with pytest.raises(InvalidInputError, match=r"5 nodes are too many: 1 replica of 4 parts can use 4"):
        nodes_of(2, 2, 1, 5)
