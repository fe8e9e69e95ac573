"""A divided model on hosts of their own networks: late and lost packets, a cut and a dead host change no answer.

``make test-cluster`` runs all of it and prints the table of docs/orca-ray.md.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlsys_serving.processes import can_supervise

from tests.orca.survival.clients import Server, answer, bodies
from tests.processes import until

from .hosts import Hosts, hosts, why_not
from .serving import command, ranks_below, served

pytest.importorskip("ray", reason="Ray has no wheel for this Python or processor")
_WHY_NOT = can_supervise() or why_not()
pytestmark = [
    pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT)),
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
]
IS_WHOLE = "MLSYS_WHOLE_CLUSTER" in os.environ  # as make test-cluster sets it
CUT_S, PATIENCE_S = 5.0, 12.0  # seconds of the cut; the server's patience with a silent host
WIRES: dict[str, dict[str, float]] = {  # of each host's link: half of what is between two
    "0 ms": {},
    "1 ms": {"delay_s": 0.0005},
    "20 ms": {"delay_s": 0.01},
    "1 ms, 0.1 % lost": {"delay_s": 0.0005, "loss": 0.0005},
}


@dataclass
class Asked:
    """What clients got."""

    answers: list[Any]
    seconds: float
    longest_s: float  # between two tokens of any of them

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.answers)) / self.seconds


def ask(url: str, trouble: Callable[[], Any] | None = None) -> Asked:
    """Ask for 14 answers at once, and make trouble beside when the first token has come."""
    stamps: list[float] = []

    def note() -> None:
        if not stamps and trouble is not None:
            threading.Thread(target=trouble).start()
        stamps.append(time.monotonic())

    async def run() -> list[Any]:
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(answer(client, url, body, note) for body in bodies(14)))

    began = time.monotonic()
    found = asyncio.run(run())
    gaps = (after - before for before, after in itertools.pairwise(stamps))
    return Asked(found, time.monotonic() - began, max(gaps))


@contextmanager
def serving(found: Hosts, model: Path, words: Path, *options: str) -> Iterator[Server]:
    """Serve on the first host."""
    program = command(model, f"{found[0].address}:6379", "--heartbeat-timeout", str(PATIENCE_S), *options)
    with served(found[0].within("setpriv", "--pdeathsig", "TERM", *program), words) as server:
        yield server
    until(lambda: not any(ranks_below(host.init) for host in found if host.init.is_running()))


@pytest.mark.skipif(not IS_WHOLE, reason="make test-cluster runs it")
@pytest.mark.parametrize("division", ["pipeline", "tensor"])
def test_a_late_wire_that_loses_packets_changes_no_answer(
    start: Any, six_layers: Path, tmp_path: Path, division: str
) -> None:
    option = f"--{division}-parallel"
    with start(**{"stages" if division == "pipeline" else "ranks": 2}) as server:
        alone = ask(server.url)
    with hosts(1, 1) as found, serving(found, six_layers, tmp_path / "words", option, "2") as server:
        assert all(ranks_below(host.init) for host in found)
        print(f"\n{option} 2 | one host, no Ray | {alone.rate:.0f} tokens/s")
        for name, wire in WIRES.items():
            found.shape(0, 1, **wire)
            asked = found[0].call(lambda: ask(server.url))
            assert asked.answers == alone.answers
            print(f"{option} 2 | two hosts, {name} | {asked.rate:.0f} tokens/s")


def test_a_cut_and_a_dead_host_change_no_answer(start: Any, six_layers: Path, tmp_path: Path) -> None:
    with start() as server:
        alone = ask(server.url)
    words = tmp_path / "words"
    with hosts(1, 1, 1) as found, serving(found, six_layers, words, "--pipeline-parallel", "2") as server:
        wire = WIRES["1 ms, 0.1 % lost"]
        found.shape(0, 1, 2, **wire)
        victim = max(number for number in (1, 2) if ranks_below(found[number].init))
        noticed: list[float] = []

        def cut() -> None:
            found.shape(victim, loss=1)
            time.sleep(CUT_S)
            found.shape(victim, **wire)

        def die() -> None:
            began = time.monotonic()
            found.lose(victim)
            until(lambda: "the seat moves" in words.read_text())
            noticed.append(time.monotonic() - began)

        for name, trouble in {"cut": cut, "die": die}.items():
            asked = found[0].call(lambda trouble=trouble: ask(server.url, trouble))
            assert asked.answers == alone.answers
            print(f"{name} | noticed after {noticed} s | {asked.longest_s:.1f} s without a token")
