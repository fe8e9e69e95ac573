"""Child processes by fork: they die with their parent, and their end is a file descriptor that becomes readable."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mlsys_core import posix
from mlsys_core.errors import ServingError
from mlsys_core.posix import can_supervise, is_stopped, machine

__all__ = ["EXIT_UNHANDLED", "Child", "Death", "can_supervise", "is_stopped"]

EXIT_UNHANDLED = 70  # an exception that nobody caught (EX_SOFTWARE)
# Handlers that a child does not inherit, by names: not every system has all.
_RESET = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGCHLD", "SIGHUP") if hasattr(signal, name)]
_THREAD_END_S = 1.0
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS})


@dataclass(frozen=True, slots=True)
class Death:
    """End of a process."""

    exit_code: int | None  # None: a signal ended it
    signal: int | None = None
    is_out_of_memory: bool = False  # the system killed a process of this group for its memory, at that time

    @property
    def is_crash(self) -> bool:
        """True if the process ended by its own doing; False if someone killed it."""
        return bool(self.exit_code) or self.is_out_of_memory or self.signal in _CRASHES

    def __str__(self) -> str:
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        name = signal.Signals(self.signal).name if self.signal in set(signal.Signals) else str(self.signal)
        return f"{name}, out of memory" if self.is_out_of_memory else name


class Child:
    """A forked process, owned by its parent.

    Args:
        name: What tools like ``ps`` and ``top`` show for its main thread, at most 15 characters.
        run: The process's life; what it returns is the exit code. An exception is printed, and exits with 70.

    Raises:
        ServingError: the parent has further threads, which a fork would leave behind with the locks they hold.
    """

    def __init__(self, name: str, run: Callable[[], int | None]) -> None:
        num_own, until = 1 + _num_blas_threads(), time.monotonic() + _THREAD_END_S
        while (num_threads := posix.num_threads()) > num_own and time.monotonic() < until:
            time.sleep(0.001)  # a thread that was joined is still seen for a moment
        if num_threads > num_own:
            names = ", ".join(thread.name for thread in threading.enumerate())
            raise ServingError(
                f"only a process with a single thread may fork, and this one has {num_threads} ({names})"
            )
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._num_kills = machine.num_memory_kills()
        blocked = posix.hold_back(_RESET)  # none finds the parent's handlers in the child
        self.pid = posix.fork()
        if self.pid == 0:
            _live(name, run, parent, blocked)
        posix.let_through(blocked)
        self.fd = posix.open_process(self.pid)  # readable when the process has ended

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        posix.signal_process(self.fd, number)

    def wait(self) -> Death:
        """Wait for the end and return it; once."""
        exit_code, number = posix.wait_for(self.pid)
        os.close(self.fd)
        if exit_code is not None:
            return Death(exit_code)
        killed = number == signal.SIGKILL and machine.num_memory_kills() > self._num_kills
        return Death(None, number, is_out_of_memory=killed)


def _live(name: str, run: Callable[[], int | None], parent: int, blocked: set[int | signal.Signals]) -> None:
    """Run the child's life and end the process, whatever happens: nothing of the parent's may run in it."""
    code = EXIT_UNHANDLED
    try:
        if not posix.die_with_parent(parent, name):
            os._exit(EXIT_UNHANDLED)
        for number in _RESET:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        posix.let_through(blocked)
        gc.freeze()
        code = run() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else EXIT_UNHANDLED
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(
                OSError, ValueError
            ):  # a terminal that has gone; it must not lead back into the parent's code
                stream.flush()
        os._exit(code)


def _num_blas_threads() -> int:
    """Return how many threads BLAS keeps for itself: it ends them before a fork, and starts new ones when asked."""
    from threadpoolctl import threadpool_info

    return sum(info["num_threads"] - 1 for info in threadpool_info() if info["internal_api"] == "openblas")


_END_S = 5.0


@dataclass(slots=True)
class Standing:
    """A child that keeps something for the workers: forked anew when it dies, and not with a new front."""

    name: str
    run: Callable[[], int | None]
    child: Child | None = None

    def fork(self, closing: Sequence[socket.socket] = ()) -> None:
        """Fork it; in the child the sockets of ``closing`` are closed."""

        def live() -> int | None:
            for end in closing:
                end.close()
            return self.run()

        self.child = Child(self.name, live)

    def end(self) -> None:
        """Ask it to end its own children and itself, and wait; kill it if it does not. Idempotent."""
        child, self.child = self.child, None
        if child is None:
            return
        child.send_signal(signal.SIGTERM)
        poll = select.poll()
        poll.register(child.fd, select.POLLIN)
        if not poll.poll(_END_S * 1e3):
            child.send_signal(signal.SIGKILL)
        child.wait()
