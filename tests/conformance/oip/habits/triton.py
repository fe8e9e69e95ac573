"""Starts the real Triton that ``nvidia-pytriton`` brings, on a model repository of its own.

PYTHON=/usr/bin/python3.11 benchmarks/peers/install.sh pytriton
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conformance.oip.habits.case import Server
from tests.conformance.oip.habits.models import write_triton_repository

ROOT = Path(__file__).parents[4]
PYTHON = Path(os.environ.get("MLSYS_TRITON_PYTHON", ROOT / ".peers" / "pytriton" / "bin" / "python"))
OPTIONS = ("--model-control-mode=explicit", "--load-model=*")
START_S = 180.0  # models of Python start one after the other, from a cold disk


@contextmanager
def triton(folder: Path) -> Iterator[Server]:
    """Run Triton with the models of ``models.py``; ``folder`` is empty, for its files and its log."""
    write_triton_repository(folder / "models")
    http, grpc = free_port(), free_port()
    script = ROOT / "benchmarks" / "peers" / "pytriton" / "tritonserver.py"
    command = [PYTHON, script, folder / "models", folder / "work", http, grpc, *OPTIONS]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([str(part) for part in command], stdout=log, stderr=log) as process,
    ):
        try:
            server = Server(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}")
            _await_ready(server, process, folder / "log")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _await_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"Triton did not start: {log.read_text()[-5000:]}")
