"""``mlsys orca serve`` as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import httpx
import psutil

from tests.processes import await_ends, by_age, end

MLSYS = [sys.executable, "-m", "mlsys_core", "orca"]


@dataclass
class Served:
    """A running ``mlsys orca serve``."""

    process: subprocess.Popen[bytes]
    log: IO[str]
    url: str = ""

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def processes(self, name: str) -> list[psutil.Process]:
        """Return its processes of that name, oldest first."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return sorted((child for child in children if child.name() == name), key=by_age)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=None)

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=None).json()


@contextmanager
def served(*arguments: str, command: Sequence[str] = MLSYS) -> Iterator[Served]:
    """Run ``mlsys orca serve`` so on a free port; it ends with the block, and leaves nobody behind."""
    command = [*command, "serve", *arguments, "--port", "0", "--threads", "1", "--log-level", "warning"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        server = Served(process, log)
        try:
            while (found := re.search(r"at (http://\S+)/v1 ", server.said())) is None:
                assert process.poll() is None, server.said()
                time.sleep(0.02)
            server.url = found[1]
            yield server
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            end(process)
        await_ends(children)
