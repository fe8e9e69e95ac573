"""Degrees to 8 x 8 as actors on a Ray cluster: the answers of one process of the same family, to the bit."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.parallel.places import EIGHT
from tests.orca.survival.clients import answers, bodies

from .serving import cluster_of, command, ranks_in, served

pytest.importorskip("ray", reason="Ray has no wheel for this Python or processor")
pytestmark = [
    pytest.mark.skipif(can_supervise() is not None, reason=str(can_supervise())),
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
]
IS_WHOLE = "MLSYS_WHOLE_CLUSTER" in os.environ  # as make test-cluster sets it
DEGREES = list(itertools.product((1, 2, 4, 8), repeat=2))
FAMILIES = random.Random(48).sample(list(EIGHT) * 4, len(DEGREES))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, where the server runs, and nodes of so many cores that large divisions lie over several."""
    with cluster_of(*([16] * 4 if IS_WHOLE else [4] * 2)) as found:
        yield found


def asked() -> list[dict[str, Any]]:
    """Return requests of every kind that needs no text."""
    return [
        {**body, "prompt": [3 + (11 * index + 7 * i) % 250 for i in range(len(body["prompt"]))]}
        for index, body in enumerate(bodies(14))
        if "structured_outputs" not in body
    ]


@pytest.mark.parametrize(
    ("ranks", "stages", "name"),
    [
        (ranks, stages, name)
        for (ranks, stages), name in zip(DEGREES, FAMILIES, strict=True)
        if IS_WHOLE or (ranks, stages) in {(8, 1), (1, 4)}
    ],
)
def test_actors_answer_as_one_process_to_the_bit(
    cluster: Any, checkpoints: Callable[[str], Path], start: Any, tmp_path: Path, ranks: int, stages: int, name: str
) -> None:
    with start(checkpoints(name), ranks=8 if ranks == 8 else 1) as server:  # eight have bits of their own
        expected = asyncio.run(answers(server.url, asked()))
    degrees = ("--tensor-parallel", str(ranks), "--pipeline-parallel", str(stages))
    arguments = command(checkpoints(name), cluster.address, "--heartbeat-timeout", "60", *degrees)
    with served(arguments, tmp_path / "words") as server:
        assert len(ranks_in(cluster)) == ranks * stages
        assert asyncio.run(answers(server.url, asked())) == expected
        assert server.metric("worker_deaths_total") == 0
    while ranks_in(cluster):  # they end with the server's keeper
        time.sleep(0.1)
