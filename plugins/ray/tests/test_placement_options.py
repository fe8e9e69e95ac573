"""Options that do not go with ``--executor ray`` are refused in one line; a missing cluster is told at once."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.serve_options import ModelOptions, PlacementOptions
from mlsys_ray.cluster import look


def placed(executor: str) -> Any:
    options = PlacementOptions(executor=executor, ray_address="127.0.0.1:1", pipeline_parallel=2)
    return options.placer("model", ModelOptions(dtype="fp32"))


def test_an_executor_is_installed_and_has_a_cluster() -> None:
    assert placed("local") is None
    with pytest.raises(InvalidInputError, match="there is no Ray cluster"):
        placed("ray")
    with pytest.raises(InvalidInputError, match="is local, ray, not 'slurm'"):
        placed("slurm")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"adapter": ["a=b"]}, "--adapter"),
        ({"device": "cuda"}, "--device cuda"),
    ],
)
def test_what_ranks_on_ray_do_not_have_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"--executor ray runs without {named}: leave one of them out"):
        PlacementOptions(executor="ray").check(ModelOptions(**options))


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(InvalidInputError, match=r"there is no Ray cluster at .*refused.*ray start --head"):
            look(f"127.0.0.1:{bound.getsockname()[1]}")
