"""Processes of tests end, whatever a signal or they themselves have done."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.processes import abandoned, end, eventually, reserved_port, until


def test_a_condition_is_awaited_and_one_that_never_holds_is_told() -> None:
    answers = iter([0, 0, 7])
    assert until(lambda: next(answers)) == 7
    answers = iter([[], [3]])
    assert asyncio.run(eventually(lambda: next(answers))) == [3]
    with pytest.raises(AssertionError, match="the last answer is 0"):
        until(lambda: 0, timeout_s=0.0)
    with pytest.raises(AssertionError, match="the last answer is None"):
        asyncio.run(eventually(lambda: None, timeout_s=0.0))


def test_a_reserved_port_can_be_served_at_once() -> None:
    with reserved_port() as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port)).close()


def test_a_stopped_process_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process.send_signal(signal.SIGSTOP)
    assert end(process) == -signal.SIGTERM


def test_one_that_does_not_end_is_killed_and_told() -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(AssertionError, match="had to be killed"):
            end(process, timeout_s=0.1)
        assert process.returncode == -signal.SIGKILL


def test_memory_is_abandoned_when_nobody_maps_it() -> None:
    memory = SharedMemory(create=True, size=64)
    file = Path("/dev/shm", memory.name)
    try:
        assert not abandoned([file])
        memory.close()
        assert abandoned([file, file.with_name("never made")]) == {file}
    finally:
        memory.unlink()
