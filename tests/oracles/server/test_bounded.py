"""The oracle of full.py, bounded: a few requests and connections for each server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles.server.full import run
from tests.oracles.server.servers import KINDS
from tests.oracles.tally import Tally

pytest.importorskip("tritonclient.http")
pytest.importorskip("tritonclient.grpc")


@pytest.mark.parametrize("kind", KINDS)
def test_clients_of_others_and_hostile_ones_are_served_or_refused(kind: str, tmp_path: Path) -> None:
    tally = Tally()
    run(kind, tmp_path, tally, examples=3, connections=30)
    assert not tally.faults
    assert min(tally.counts["equal"], tally.counts["refused"]) > 10
