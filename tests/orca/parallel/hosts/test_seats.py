"""Seats of nodes: whatever joins and goes, nobody has two seats, and spares sit down in their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_orca.parallel.hosts.assignment import assign
from mlsys_orca.parallel.hosts.identity import host_and_seat, node_name
from mlsys_orca.parallel.hosts.seats import Seats
from mlsys_orca.parallel.placement import Placement


def seats_of(nodes: int, *, stages: int = 2, replicas: int = 1) -> Seats:
    degrees = {"tensor_parallel": 1, "pipeline_parallel": stages}
    return Seats(assign(**degrees, num_replicas=replicas, num_nodes=nodes))


def test_a_replica_waits_for_nodes_then_for_their_parts() -> None:
    seats, first, last = seats_of(2), Placement(num_stages=2), Placement(stage=1, num_stages=2)
    assert seats.lacks() == "2 of 2 nodes are missing"
    assert seats.join(7) == 0
    assert seats.lacks(0) == "1 of 2 nodes is missing"
    assert seats.join(8) == 1
    assert seats.nodes_of(0) is None
    seats.load(7, first)
    seats.load(7, last)  # not its own
    assert seats.lacks(0) == "nodes load 1 of its parts"
    seats.load(8, last)
    assert seats.lacks(0) is None
    assert seats.nodes_of(0) == {first: 7, last: 8}


def test_a_spare_takes_the_seat_and_loads_anew() -> None:
    seats = seats_of(1, stages=1)
    place = Placement()
    assert [seats.join(1), seats.join(2), seats.join(3)] == [0, None, None]
    seats.load(1, place)
    assert seats.lose(1) == (0, 2)
    assert seats.nodes_of(0) is None
    seats.load(2, place)
    assert seats.nodes_of(0) == {place: 2}
    assert seats.lose(3) is None  # a spare
    assert seats.lose(2) == (0, None)
    assert seats.lacks() == "1 of 1 nodes is missing"


def test_a_replica_does_not_wait_for_another_ones_node() -> None:
    seats = seats_of(2, stages=1, replicas=2)
    seats.join(1)
    seats.load(1, Placement())
    assert seats.nodes_of(0) == {Placement(): 1}
    assert seats.nodes_of(1) is None
    assert seats.lacks(1) == "1 of 1 nodes is missing"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_seats_are_full_whenever_there_are_enough_nodes(steps: list[tuple[bool, int]]) -> None:
    seats, alive = seats_of(3, stages=3), dict[int, None]()
    for joins, node in steps:
        if joins and node not in alive:
            alive[node] = None
            seats.join(node)
        elif not joins and node in alive:
            del alive[node]
            seats.lose(node)
        assert seats.num_joined == min(3, len(alive))
        for sits in alive:
            seats.load(sits, Placement(stage=0, num_stages=3))
            seats.load(sits, Placement(stage=1, num_stages=3))
            seats.load(sits, Placement(stage=2, num_stages=3))
        found = seats.nodes_of(0)
        assert (found is not None) == (len(alive) >= 3)
        if found is not None:
            assert len(set(found.values())) == 3
            assert set(found.values()) <= set(alive)


@pytest.mark.parametrize("seat", [None, 0, 12])
def test_a_node_s_name_tells_its_seat(seat: int | None) -> None:
    assert host_and_seat(node_name("red", seat)) == ("red", seat)


@pytest.mark.parametrize("name", ["node red seat x", "node red seat -1", "node red seat 99999999999999999999"])
def test_a_seat_that_is_no_number_is_none(name: str) -> None:
    assert host_and_seat(name)[1] is None
