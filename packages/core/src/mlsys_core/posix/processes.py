"""Processes: forks, ends as descriptors, signals that wait."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from mlsys_core.posix.lacking import lacks

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_TASKS = Path("/proc/self/task")


def can_supervise() -> str | None:
    """Return None if this machine has what a supervisor needs, else what it lacks."""
    if platform.system() != "Linux" or not hasattr(os, "pidfd_open"):
        return f"processes are supervised on Linux only, and this is {platform.system()}"
    try:
        os.close(open_process(os.getpid()))
    except OSError as error:
        return f"this system opens no pidfd ({error.strerror})"
    return None


def fork() -> int:
    """Fork; return 0 in the child, and the child's number in the parent.

    Raises:
        UnsupportedSystemError: the system has no forks.
    """
    if not hasattr(os, "fork"):
        raise lacks("processes cannot be forked")
    return os.fork()


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    in_parent: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Have functions called at each fork of this process from now on; where there are no forks, never."""
    if hasattr(os, "register_at_fork"):
        given = {"before": before, "after_in_parent": in_parent, "after_in_child": in_child}
        os.register_at_fork(**{name: call for name, call in given.items() if call is not None})


def num_threads() -> int:
    """Return the threads of this process, those of native libraries too."""
    return len(list(_TASKS.iterdir()))


def open_process(pid: int) -> int:
    """Return a descriptor of a process, readable when it has ended."""
    return os.pidfd_open(pid)


def signal_process(fd: int, number: int) -> None:
    """Send a signal to a process by its descriptor; nothing happens if it has ended."""
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return


def signal_group(group: int, number: int) -> None:
    """Send a signal to all processes of a group; nothing happens if they have ended.

    Raises:
        UnsupportedSystemError: the system has no such groups.
    """
    if not hasattr(os, "killpg"):
        raise lacks("groups of processes get no signals")
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def wait_for(pid: int) -> tuple[int | None, int | None]:
    """Wait for a child's end and return its exit code, or None and the signal that ended it; once."""
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status), None
    return None, os.WTERMSIG(status)


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal, such as SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def hold_back(numbers: Iterable[int]) -> set[int | signal.Signals]:
    """Have signals wait in this thread; return which waited before, for :func:`let_through`."""
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, numbers))


def let_through(before: Iterable[int]) -> None:
    """Have only the signals ``before`` wait in this thread."""
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int, name: str) -> bool:
    """Have the system kill this process when its parent ends, and call it ``name``; False: the parent has ended.

    It gets a group of its own, so that a terminal's Ctrl-C is for the parent alone, which passes on what is to be.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    if os.getppid() != parent:  # which died before it could be watched
        return False
    os.setpgid(0, 0)
    return True


def has_terminal() -> bool:
    """Return whether the process has a controlling terminal: when that closes, SIGHUP comes as well, and means end."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
