"""Options that do not go with ``--executor ray`` are refused in one line; a missing cluster is told at once."""

from __future__ import annotations

import socket

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.ray import refuse_ray
from mlsys_orca.parallel.hosts.identity import host_and_seat, node_name
from mlsys_orca.parallel.ray.cluster import look


def test_what_ray_decides_is_refused() -> None:
    refuse_ray("local", {"--nodes": 2})
    refuse_ray("ray", {"--nodes": None, "--control-only": False})
    with pytest.raises(InvalidInputError, match="--executor ray decides about --nodes itself"):
        refuse_ray("ray", {"--nodes": 2})
    with pytest.raises(InvalidInputError, match="is local or ray, not 'slurm'"):
        refuse_ray("slurm", {})


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(InvalidInputError, match=r"there is no Ray cluster at .*refused.*ray start --head"):
            look(f"127.0.0.1:{bound.getsockname()[1]}")


@pytest.mark.parametrize("seat", [None, 0, 12])
def test_a_node_s_name_tells_its_seat(seat: int | None) -> None:
    assert host_and_seat(node_name("red", seat)) == ("red", seat)


@pytest.mark.parametrize("name", ["node red seat x", "node red seat -1", "node red seat 99999999999999999999"])
def test_a_seat_that_is_no_number_is_none(name: str) -> None:
    assert host_and_seat(name)[1] is None
