"""Servers behind the snippets of a page; a page's hidden blocks start them."""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import subprocess
import threading
import time

import httpx

from tests.processes import end


def serving(command: str) -> None:
    """Start ``mlsys ...`` and return when it is ready; it ends with this process.

    Args:
        command: As on the page, with ``--port``.
    """
    words = shlex.split(command)
    port = words[words.index("--port") + 1]
    server = subprocess.Popen(words)
    atexit.register(end, server)
    _wait(f"http://127.0.0.1:{port}", server)


def when_ready_stop(url: str) -> None:
    """End the server that a snippet is about to run in this process, once it is ready."""

    def stop() -> None:
        _wait(url, None)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()


def _wait(url: str, server: subprocess.Popen[bytes] | None) -> None:
    while True:
        assert server is None or server.poll() is None, "the server has ended"
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
