"""The process that renders chat templates, seen from this side: started when first asked, and again if it was ended.

One for this process, whatever models it has: a template's text goes with each request. Frames go through pipes, so
that nothing here waits with the interpreter's lock; see :mod:`mlsys_orca.text.template_worker` for what they hold.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_core.posix import at_fork
from mlsys_orca.text.template_worker import MAX_CPU_S, read_frame, write_frame

_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """A renderer of chat templates. Thread-safe; one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process that started it: pipes are not shared with forks
        at_fork(in_child=self._renew_lock)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the worker's answer to one request.

        Raises:
            InvalidInputError: the template refuses it, or takes more time or memory than one may; in its own words.
            ServingError: no process can be started.
        """
        frame = json.dumps(request).encode()
        with self._lock:
            process = self._running()
            try:
                write_frame(cast(BinaryIO, process.stdin), frame)
                reply = read_frame(cast(BinaryIO, process.stdout))
            except OSError:  # it has ended
                reply = None
            except BaseException:  # broken off in the middle of a frame
                self._end(process)
                raise
            if reply is None:
                raise InvalidInputError(self._end(process))
        found: dict[str, Any] = json.loads(reply)
        if "refused" in found:
            raise InvalidInputError(found["refused"])
        return found

    def close(self) -> None:
        """End the process. The next request starts another."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                self._end(self._process)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()  # whoever held it does not exist in a fork

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
                # A preloaded allocator or sanitiser may want more addresses than the worker is given.
                env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            )
        except OSError as error:
            raise ServingError(f"the process for chat templates cannot be started: {error}") from error
        self._owner = os.getpid()
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Take the process away; returns why it had ended, as far as it is known."""
        self._process = None
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            try:
                cast(BinaryIO, pipe).close()
            except OSError:  # what was not written yet has no reader
                continue
        if code == -getattr(signal, "SIGPROF", 0):
            return f"it takes more than {MAX_CPU_S:g} s of processor time"
        return f"the process that renders it ended with status {code}"


renderer = TemplateProcess()  # its owner is this process; it starts with the first template
