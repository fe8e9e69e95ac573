"""A rank that a signal has stopped is noticed within seconds, also in its first iterations, and told of as killed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from mlsys_orca.parallel import group
from mlsys_orca.parallel.group import Group
from mlsys_orca.parallel.holder import Born, Died
from mlsys_orca.parallel.placement import Placement
from mlsys_serving.processes import is_stopped

encode = msgspec.msgpack.Encoder().encode


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of one rank, which is a process that sleeps, and its holder's end of the life socket."""
    monkeypatch.setattr(group, "_LOOK_S", 0.05)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found: Any = Group.__new__(Group)
    found.lives, found._pids = {Placement(): ours}, set()
    theirs.send(encode(Born(process.pid)))
    yield SimpleNamespace(group=found, process=process, holder=theirs)
    process.kill()
    process.wait()
    ours.close()
    theirs.close()


def test_a_stopped_rank_counts_as_killed(watched: Any) -> None:
    watched.process.send_signal(signal.SIGSTOP)
    while not is_stopped(watched.process.pid):
        time.sleep(0.01)
    death = watched.group.cause(None)
    assert death.signal == signal.SIGSTOP
    assert not death.is_crash


def test_a_death_is_told_as_it_was(watched: Any) -> None:
    assert watched.group.cause(0.2) is None, "it lives"
    watched.holder.send(encode(Died(None, signal.SIGSEGV, False)))
    assert watched.group.cause(None).signal == signal.SIGSEGV
