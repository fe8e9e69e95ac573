"""Programs whose imports are made once: a process that has made them forks one that runs ``main()`` for each start.

``Warm("tests.orca.survival.server").start("a", "b")`` runs as ``python server.py a b`` would, with the same outputs,
but for two seconds of importing torch. What it returns is used as a :class:`subprocess.Popen`. All processes of one
:class:`Warm` have Python's hashes of strings in common; tests of the real commands have not.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[1]


class Started:
    """A process that a warm one has forked.

    Args:
        pid: Its number.
        end: Tells how it ended; closing it lets the number go.
        pidfd: Its descriptor.
        stdout: What it prints.
    """

    def __init__(self, pid: int, end: socket.socket, pidfd: int, stdout: TextIO) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._end, self._pidfd = end, pidfd

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, as ``Popen`` has it, when the process has ended."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._end.recv(16))
            self._end.close()
            os.close(self._pidfd)
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Warm:
    """A process that has imported ``module`` and what it will need; ends with :meth:`close`, or with this process.

    Args:
        module: Has ``main() -> int``.
        also: Further modules to import ahead.
    """

    def __init__(self, module: str, *also: str) -> None:
        self._module, self._folder = module, tempfile.mkdtemp(prefix="warm")
        self.address = f"{self._folder}/starts"
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(listener.fileno()), module, *also],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            )

    def start(self, *arguments: str) -> Started:
        """Run ``main()`` with these arguments in a process of its own."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(self.address)
        reading, writing = os.pipe()
        with open(os.memfd_create("asked"), "w+b", 0) as file, open(os.devnull) as nothing:  # noqa: PTH123
            file.write(json.dumps([self._module, *arguments]).encode())
            socket.send_fds(end, [b"go"], [file.fileno(), nothing.fileno(), writing, 2])
        os.close(writing)
        number, (pidfd,), _, _ = socket.recv_fds(end, 16, 1)
        return Started(int(number), end, pidfd, os.fdopen(reading, encoding="utf-8"))

    def close(self) -> None:
        """End the warm process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._folder)


@dataclass(eq=False, slots=True)
class Fork:
    """A process that the warm one has forked, until nobody asks for it."""

    pid: int
    pidfd: int
    end: socket.socket
    has_ended: bool = False

    def leave(self) -> None:
        """Kill what is left, and let the number go."""
        if not self.has_ended:
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.end.close()


def run(arguments: list[str], files: list[int]) -> None:
    """Run ``main()`` and end this process."""
    from mlsys_core.exits import end_process

    code: int | None = 1
    try:
        for number, fd in enumerate(files):
            os.dup2(fd, number)
            os.close(fd)
        sys.argv = arguments
        code = importlib.import_module(arguments[0]).main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    end_process(code or 0)


def accept(listener: socket.socket, forks: list[Fork]) -> Fork | None:
    """Fork for who has connected."""
    end, _ = listener.accept()
    _, given, _, _ = socket.recv_fds(end, 16, 4)
    if not given:
        end.close()
        return None
    with os.fdopen(given[0], "rb") as file:
        file.seek(0)
        arguments = json.loads(file.read())
    pid = os.fork()
    if pid == 0:
        for each in (listener, end, *(fork.end for fork in forks)):
            each.close()
        for fork in forks:
            os.close(fork.pidfd)
        run(arguments, given[1:])
    for fd in given[1:]:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    with suppress(OSError):  # who asked has gone
        socket.send_fds(end, [str(pid).encode()], [pidfd])
    return Fork(pid, pidfd, end)


def serve(listener: socket.socket) -> None:
    """Fork for each connection and tell how it ends, until standard input does."""
    forks: list[Fork] = []
    while True:
        running = {fork.pidfd: fork for fork in forks if not fork.has_ended}
        asking = {fork.end: fork for fork in forks}
        for ready in select.select([0, listener, *running, *asking], [], [])[0]:
            if ready == 0:
                for fork in forks:
                    fork.leave()
                return
            if ready is listener:
                if (made := accept(listener, forks)) is not None:
                    forks.append(made)
            elif ready in running:
                fork = running[ready]
                how = os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
                assert how is not None
                fork.has_ended = True
                with suppress(OSError):  # nobody waits for it
                    fork.end.send(str(how.si_status if how.si_code == os.CLD_EXITED else -how.si_status).encode())
            else:
                forks.remove(asking[ready])
                asking[ready].leave()
                break  # its descriptor may stand further down this list


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
