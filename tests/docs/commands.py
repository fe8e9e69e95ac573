"""Run the shell commands of README and the reference pages, one after another in one folder.

``python -m tests.docs.commands [PAGE...]`` prints each command with its seconds, and a tally. Equal commands run once.
A command that serves stays until the next one that serves otherwise; where one is repeated and its page has no more
commands, it is not started again. What is not run stands in ``not_run.txt`` with its
reason.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.docs.blocks import ROOT, SHELLS, blocks_of, pages
from tests.docs.run_page import ALL_RUN

_SERVES = re.compile(r"^mlsys (\w+ serve|serve \w+)\b")
_PORTS = re.compile(r" --(?:grpc-)?port \d+")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page."""

    page: str
    line: int
    text: str  # without its comment


@dataclass(frozen=True, slots=True)
class Omission:
    """A line of ``not_run.txt``: commands that begin so are not run."""

    page: str  # "*": of every page
    prefix: str
    reason: str

    def covers(self, command: Command) -> bool:
        """Return whether the command is left out by this line."""
        return self.page in ("*", command.page) and command.text.startswith(self.prefix)


def omissions() -> list[Omission]:
    """Return the lines of ``not_run.txt``."""
    lines = Path(__file__).with_name("not_run.txt").read_text(encoding="utf-8").splitlines()
    return [Omission(*(part.strip() for part in line.split(" | "))) for line in lines if line and line[0] != "#"]


def commands() -> list[Command]:
    """Return the commands of all pages that :mod:`~tests.docs.run_page` does not run whole."""
    found = []
    for page in pages():
        if page.parent.name in ALL_RUN:
            continue
        for block in blocks_of(page.read_text(encoding="utf-8")):
            if block.language not in SHELLS or block.is_hidden:
                continue
            text, line = "", block.line
            for number, whole in enumerate(block.text.splitlines()):
                part = re.sub(r"(^|\s)#\s.*$", "", whole).rstrip()
                text, line = (text + "\n" + part, line) if text else (part, block.line + number)
                if text.endswith("\\") or text.count("'") % 2:
                    continue
                if text.strip():
                    found.append(Command(str(page.relative_to(ROOT)), line, text.strip()))
                text = ""
    return found


class Shell:
    """A folder, and the server that runs in it.

    Args:
        folder: Where commands run.
        mlsys: The folder of the command ``mlsys``.
    """

    def __init__(self, folder: Path, mlsys: Path) -> None:
        self._folder = folder
        path = os.pathsep.join((str(mlsys), str(Path(sys.executable).parent), os.environ["PATH"]))
        self._environment = os.environ | {"PATH": path, "MPLBACKEND": "agg"}
        self._server: subprocess.Popen[bytes] | None = None
        self._serves, self._port = "", 0

    def run(self, text: str) -> None:
        """Run a command.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        before, _, last = text.replace("~/", "./").rpartition(" && ")
        if _SERVES.match(last):
            if before:
                self._call(before)
            self._serve(last)
        elif self._server is not None:
            self._call(re.sub(r"(localhost|127\.0\.0\.1):8000", rf"\1:{self._port}", text))
        else:
            self._call(text)

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            assert self._server.wait(60) == 0, f"{self._serves} ended badly"
            self._server = None

    def _call(self, text: str) -> None:
        words = ["bash", "-euo", "pipefail", "-c", re.sub(r"^curl ", "curl --fail ", text)]
        done = subprocess.run(
            words, cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, text, done.stdout[-2000:], done.stderr[-4000:])

    def _serve(self, text: str) -> None:
        bare = _PORTS.sub("", text)
        if bare == self._serves and self._server is not None:
            return
        self.close()
        ports = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as bound:
                ports.append(bound.getsockname()[1])
        self._serves, self._port = bare, ports[0]
        words = [*shlex.split(bare), "--port", str(ports[0]), "--log-level", "error"]
        words += ["--grpc-port", str(ports[1])] if "--grpc-port" in text else []
        log = self._folder / "server.log"
        with log.open("wb") as output:
            self._server = subprocess.Popen(
                words, cwd=self._folder, env=self._environment, stdout=output, stderr=output
            )
        while True:
            assert self._server.poll() is None, f"{text} has ended: {log.read_text()[-3000:]}"
            try:
                if httpx.get(f"http://127.0.0.1:{self._port}/health/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)


def run_all(folder: Path, mlsys: Path, only: Sequence[str] = ()) -> Counter[str]:
    """Run every command that is not left out; return how many ran, and how many did not, by reason.

    Args:
        folder: Where they run.
        mlsys: The folder of the command ``mlsys``.
        only: Pages; none: all.
    """
    left_out, tally, seen = omissions(), Counter[str](), set[str]()
    shell = Shell(folder, mlsys)
    (folder / "examples").symlink_to(ROOT / "examples")
    shell.run(f"{sys.executable} {Path(__file__).with_name('files.py')}")
    found = [command for command in commands() if not only or command.page in only]
    reasons = [next((each.reason for each in left_out if each.covers(command)), None) for command in found]
    last = {command.page: number for number, command in enumerate(found) if reasons[number] is None}
    try:
        for number, command in enumerate(found):
            reason, same = reasons[number], _PORTS.sub("", command.text)
            if reason is not None:
                tally[f"not run: {reason}"] += 1
            elif same in seen and (number == last[command.page] or not _SERVES.match(same)):
                tally["run, on another page"] += 1
            else:
                seen.add(same)
                started = time.perf_counter()
                try:
                    shell.run(command.text)
                except subprocess.CalledProcessError as error:
                    raise AssertionError(
                        f"{command.page}:{command.line}: {command.text}\n{error.output}\n{error.stderr}"
                    ) from error
                took_s = time.perf_counter() - started
                print(f"{took_s:6.1f} s  {command.page}:{command.line}: {command.text}", flush=True)
                tally["run"] += 1
    finally:
        shell.close()
    return tally


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        real = Path(sys.executable).parent
        for name, count in run_all(Path(made), real, sys.argv[1:]).most_common():
            print(f"{count:4}  {name}")
