"""The end of a process: its exit functions, output, exit code and threads are those of Python's own end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = "import atexit, sys, threading, time\nfrom mlsys_core.exits import end_process\n"


def end(script: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BEGIN + script]
    options = {"capture_output": True, "env": {**os.environ, "PYTHONUNBUFFERED": ""}, **options}
    return subprocess.run(command, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("code", [0, 3, 130])
def test_exit_functions_run_and_output_is_written(code: int) -> None:
    done = end(f"atexit.register(print, 'last')\nprint('first', end=' ')\nend_process({code})")
    assert (done.returncode, done.stdout, done.stderr) == (code, "first last\n", "")


def test_nothing_is_freed() -> None:
    done = end("class Loud:\n    def __del__(self): print('freed')\nkept = Loud()\nend_process(0)")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_thread_that_must_end_is_waited_for() -> None:
    done = end("threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nend_process(4)")
    assert (done.returncode, done.stdout) == (4, "thread\n")


def test_a_closed_stream_is_left_alone() -> None:
    assert end("sys.stderr.close()\nprint('x')\nend_process(5)").returncode == 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = end(
            "sys.stdout.write('lost')\nend_process(0)", capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 120
    assert "No space left" in done.stderr
