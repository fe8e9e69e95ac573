"""Run one model in a process of its own: it may take too long, or die, and the next one begins anew."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from tests.oracles.nimble_zoo.compare import Tally

Run = Callable[[Tally], str | None]  # notes its cases; returns the reason if the model cannot be run
PATIENCE = 6  # a child may wait this many times its processor time: the machine has other work


class Note(NamedTuple):
    """Outcome of one case."""

    case: str
    outcome: str
    detail: str


class _Sender(Tally):
    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def note(self, name: str, outcome: str, detail: str = "") -> None:
        self._connection.send(Note(name, outcome, detail))


def run_in_child(name: str, run: Run, limit_s: int, *, patience: int = PATIENCE) -> tuple[list[Note], str | None]:
    """Run a model in a fork of this process.

    Args:
        name: The model.
        run: Its cases.
        limit_s: Seconds of processor time it may take.
        patience: How many times that it may take by the clock.

    Returns:
        The outcome of each case that ended, and why the rest was not run; None if all were. A process that dies by
        itself is a case, too: ``"raw"``.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(run, sender, limit_s))
    child.start()
    sender.close()
    notes: list[Note] = []
    reason, has_ended = None, False
    end = time.monotonic() + patience * limit_s
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            message = receiver.recv()
            if isinstance(message, Note):
                notes.append(message)
            else:
                reason, has_ended = message, True
    except EOFError:
        pass
    else:
        child.kill()
        reason, has_ended = f"no end within {patience * limit_s} s", True
    child.join()
    if child.exitcode == -signal.SIGXCPU:
        reason, has_ended = f"more than {limit_s} s of processor time", True
    if not has_ended:
        notes.append(Note(f"{name}, process", "raw", f"the process died with status {child.exitcode}"))
    return notes, reason


def _child(run: Run, connection: Connection, limit_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
    try:
        reason = run(_Sender(connection))
    except Exception as error:  # noqa: BLE001 - eager itself, or this oracle
        reason = f"eager fails: {type(error).__name__}: {str(error)[:100]}"
        traceback.print_exc(limit=2)
    connection.send(reason)
    connection.close()
