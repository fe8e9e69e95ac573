"""Options that do not go with ``--executor ray`` are refused in one line; a missing cluster is told at once."""

from __future__ import annotations

import socket

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.hosts import HostOptions, placed_options
from mlsys_ray.cluster import look


def placed(executor: str, **refused: object) -> HostOptions:
    times = {"heartbeat_timeout": 5.0, "join_timeout": 300.0}
    degrees = {"tensor_parallel": 1, "pipeline_parallel": 2, "replicas": 1, "threads": 1}
    return placed_options(executor, "model", address="127.0.0.1:1", listen=None, **degrees, **times, refused=refused)


def test_what_ray_decides_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="there is no Ray cluster"):
        placed("ray", nodes=None, control_only=False)
    with pytest.raises(InvalidInputError, match="--executor ray decides about --nodes itself"):
        placed("ray", **{"--nodes": 2})
    with pytest.raises(InvalidInputError, match="is local, ray, not 'slurm'"):
        placed("slurm")


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(InvalidInputError, match=r"there is no Ray cluster at .*refused.*ray start --head"):
            look(f"127.0.0.1:{bound.getsockname()[1]}")
