"""The reference server in a process of its own, as a user's would be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def reference_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """``{"http": "host:port", "grpc": "host:port"}``."""
    log = (tmp_path_factory.mktemp("oip") / "log").open("w")
    command = [sys.executable, str(Path(__file__).with_name("server.py"))]
    with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        try:
            urls: dict[str, str] = json.loads(process.stdout.readline())
            yield urls
        finally:
            process.terminate()
        assert process.wait() == 0  # a clean drain
