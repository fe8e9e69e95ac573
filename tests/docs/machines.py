"""Quickstarts of several machines, run on this one: a page's shell blocks as they are printed, on 127.0.0.1."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.docs.blocks import blocks_of
from tests.docs.run_page import on_free_ports
from tests.processes import end

_STAYS = re.compile(r"mlsys orca (serve|worker) ")


def run_quickstart(heading: str) -> str:
    """Run the shell blocks of one section of this process's page, and return what its last command printed.

    Commands that stay are started beside each other and end with this process; what follows waits for the server.
    """
    page = on_free_ports(Path(sys.argv[1]).read_text(encoding="utf-8"))
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].replace("10.0.0.1", "127.0.0.1")
    port = re.search(r"--port (\d+)", section)
    assert port is not None
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the mlsys of this Python
    environment, printed, started = os.environ | {"PATH": beside}, "", list[subprocess.Popen[bytes]]()
    for block in blocks_of(section):
        if block.language != "bash":
            continue
        for command in re.split(r"(?<!\\)\n", block.text.strip()):
            if _STAYS.search(command):
                started.append(subprocess.Popen(["bash", "-c", f"exec {command}"], env=environment))
                atexit.register(end, started[-1])
                continue
            if started:
                _wait(f"http://127.0.0.1:{port[1]}/health/ready", started)
            printed = subprocess.run(
                ["bash", "-c", command], env=environment, check=True, capture_output=True, text=True
            ).stdout
    started[0].send_signal(signal.SIGINT)
    assert [each.wait(60) for each in started] == [0] * len(started), "the workers end with the server"
    return printed


def _wait(url: str, started: list[subprocess.Popen[bytes]]) -> None:
    while True:
        assert all(each.poll() is None for each in started), "a command has ended"
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
