"""Seats fit the nodes' cores, hold each part once, and keep replicas together and apart from each other."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.placing import PlacedModel
from mlsys_ray.plan import place, plan_seats, ranks_of

DEGREES = st.tuples(*[st.integers(1, 4)] * 4)


@given(DEGREES, st.lists(st.integers(0, 16), max_size=6))
def test_a_plan_fits_the_nodes_and_has_room_for_all_ranks(degrees: tuple[int, ...], sizes: list[int]) -> None:
    ranks, stages, replicas, threads = degrees
    cores = {f"node {index}": size for index, size in enumerate(sizes)}
    try:
        plan = plan_seats(
            tensor_parallel=ranks, pipeline_parallel=stages, num_replicas=replicas, num_threads=threads, cores=cores
        )
    except InvalidInputError:
        # A seat of one rank is the smallest: if as many as are needed fit, there is a plan.
        assert sum(size // threads for size in sizes) < ranks * stages * replicas
        return
    assert all(count * plan.cores <= cores[node] for node, count in Counter(plan.nodes).items())
    assert plan.num_seats * plan.cores == ranks * stages * replicas * threads
    assert plan.num_seats % (stages * replicas) == 0
    assert plan.cores % threads == 0
    form = {"model": "m", "address": "", "dtype": "fp32", "weights": None, "activations": None}
    times = {"heartbeat_timeout_s": 5.0, "join_timeout_s": 300.0}
    degrees_of = {"tensor_parallel": ranks, "pipeline_parallel": stages, "num_replicas": replicas}
    model = PlacedModel(**form, **times, **degrees_of, num_threads=threads)
    seated = [ranks_of(seat, model, plan.cores) for seat in range(plan.num_seats)]
    found = [(replica, each.stage, each.rank) for replica, places in seated for each in places]
    assert found == [(a, b, c) for a in range(replicas) for b in range(stages) for c in range(ranks)]


def test_replicas_stay_whole_and_apart() -> None:
    plan = plan_seats(
        tensor_parallel=2, pipeline_parallel=2, num_replicas=2, num_threads=1, cores={"a": 8, "b": 8, "c": 2}
    )
    assert (plan.cores, plan.nodes) == (2, ("a", "a", "b", "b"))


def test_a_stage_that_fits_no_node_is_parted() -> None:
    plan = plan_seats(
        tensor_parallel=4, pipeline_parallel=1, num_replicas=1, num_threads=2, cores={"a": 5, "b": 4, "c": 1}
    )
    assert (plan.cores, plan.nodes) == (4, ("a", "b"))


def test_too_few_cores_are_told() -> None:
    with pytest.raises(InvalidInputError, match="take 8 cores, and do not fit the Ray cluster's nodes of 4, 3 cores"):
        plan_seats(tensor_parallel=1, pipeline_parallel=4, num_replicas=2, num_threads=1, cores={"a": 3, "b": 4})


def test_a_seat_moves_to_where_most_room_is() -> None:
    assert place(2, {"a": 1, "b": 2, "c": 4}) == "c"
    assert place(5, {"a": 1, "b": 2, "c": 4}) is None
    assert place(1, {}) is None
