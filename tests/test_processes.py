"""Processes of tests end, whatever a signal or they themselves have done."""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.processes import abandoned, end


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
