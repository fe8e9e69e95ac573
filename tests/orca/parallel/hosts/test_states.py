"""States between processes over gloo: they come whole and in order, and a lost stage is an error and no hang."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mlsys_orca.parallel.hosts.states import DistributedIn, DistributedOut
from mlsys_orca.parallel.shard import GroupBrokenError
from torch import distributed

HIDDEN, DEPTH = 8, 2
SIZES = [3, 1, 5, 2, 4]  # tokens of each iteration


def states_of(number: int) -> torch.Tensor:
    return torch.randn(SIZES[number], HIDDEN, generator=torch.Generator().manual_seed(number))


def join(address: str, rank: int) -> None:
    distributed.init_process_group("gloo", address, datetime.timedelta(seconds=60), 2, rank)


def first_stage(address: str) -> None:
    join(address, 0)
    out = DistributedOut(hidden_size=HIDDEN, depth=DEPTH, max_tokens=8, receivers=[1])
    for number in range(len(SIZES)):
        out.room(number, SIZES[number]).copy_(states_of(number))
        out.send(number)
    for number in (len(SIZES), len(SIZES) + 1):
        out.room(number, 1)  # what was sent has gone
    os.kill(os.getpid(), signal.SIGKILL)


def last_stage(address: str, report: str) -> None:
    join(address, 1)
    receiver = DistributedIn(hidden_size=HIDDEN, sender=0)
    equal = [torch.equal(receiver.receive(number, SIZES[number]), states_of(number)) for number in range(len(SIZES))]
    error = ""
    try:
        receiver.receive(len(SIZES), 1)
    except GroupBrokenError as broken:
        error = str(broken)
    Path(report).write_text(f"{all(equal)} {error}")


@pytest.mark.skipif(sys.platform != "linux", reason="ranks run on Linux alone")
def test_states_come_in_order_and_a_lost_stage_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    report = tmp_path / "report"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    stages = [
        subprocess.Popen([sys.executable, __file__, *arguments], env=environment)
        for arguments in (("first", address), ("last", address, str(report)))
    ]
    try:
        assert [stage.wait(120) for stage in stages] == [-signal.SIGKILL, 0]
        assert report.read_text().startswith("True the stage before this one is gone")
    finally:
        for stage in stages:
            stage.kill()
            stage.wait()


if __name__ == "__main__":
    if sys.argv[1] == "first":
        first_stage(sys.argv[2])
    else:
        last_stage(*sys.argv[2:])
