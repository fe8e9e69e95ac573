"""Calls that not every system has: locks, forks, descriptors of processes and memory. Nothing else makes them.

Importing this works everywhere; what a system lacks is refused in one line when it is asked for, or is left out where
nothing depends on it. ``scripts/check_repo.py`` finds such a call in any other module.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mlsys_core.errors import MlsysError

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_TASKS = Path("/proc/self/task")
_SHARED = Path("/dev/shm")


class UnsupportedSystemError(MlsysError):
    """This system lacks what was asked for."""

    exit_code = 2


def lacks(what: str) -> UnsupportedSystemError:
    """Return the refusal of ``what``, a whole clause without the system's name.

    Example:
        >>> str(lacks("files cannot be locked")).startswith("files cannot be locked on ")
        True
    """
    return UnsupportedSystemError(f"{what} on {sys.platform}; use Linux (on Windows: WSL 2)")


def lock_file(fd: int, *, waits: bool = True) -> bool:
    """Lock an open file against other processes until it is closed; return False if another has it.

    Args:
        fd: The file.
        waits: Wait until no other process has it.

    Raises:
        UnsupportedSystemError: the system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        raise lacks("files cannot be locked") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def lock_for_process(fd: int) -> None:
    """Wait until no other process has an open file, and have it until this process ends, though forks share it.

    Raises:
        UnsupportedSystemError: the system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        raise lacks("files cannot be locked") from None
    fcntl.lockf(fd, fcntl.LOCK_EX)


def can_lock() -> bool:
    """Return whether files can be locked."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        return False
    return True


def user_id() -> int:
    """Return the user as whom this process acts; 0 where files belong to nobody in particular."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def is_own_group(group_id: int) -> bool:
    """Return whether only this process's user is in a group; False where that is not known."""
    try:
        import grp
        import pwd

        user, group = pwd.getpwuid(user_id()).pw_name, grp.getgrgid(group_id)
    except (ImportError, KeyError):
        return False
    return group_id == 0 or (group.gr_name == user and set(group.gr_mem) <= {user})


def open_files_limit(wanted: int) -> int | None:
    """Return how many files this process may open, raised towards ``wanted`` if need be; None: no known bound."""
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Return at most so many bytes of an open file from ``offset`` on; its position stays.

    Raises:
        UnsupportedSystemError: the system cannot.
    """
    if not hasattr(os, "pread"):
        raise lacks("files cannot be read at a place")
    return os.pread(fd, nbytes, offset)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write to an open file from ``offset`` on and return how many bytes were; its position stays.

    Raises:
        UnsupportedSystemError: the system cannot.
    """
    if not hasattr(os, "pwrite"):
        raise lacks("files cannot be written at a place")
    return os.pwrite(fd, data, offset)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder; where folders are not opened (Windows), do nothing."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def message_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a local socket that keeps messages apart.

    Raises:
        UnsupportedSystemError: the system has none.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "SOCK_SEQPACKET"):
        raise lacks("processes cannot exchange messages")
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def stream_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a local socket for a stream of bytes.

    Raises:
        UnsupportedSystemError: the system has none.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise lacks("processes cannot exchange descriptors")
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def is_local(end: socket.socket) -> bool:
    """Return whether a socket stays within this machine's kernel."""
    return end.family == getattr(socket, "AF_UNIX", None)


def send_descriptors(end: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one message with open files, which the receiver gets as files of its own."""
    socket.send_fds(end, [data], fds)


def receive_descriptors(end: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int]]:
    """Return the next message, of at most so many bytes, and its open files, of which there are ``most`` at most."""
    data, fds, _, _ = socket.recv_fds(end, nbytes, most)
    return data, list(fds)


def memory_file(name: str) -> int:
    """Return an open file that lies in memory and has no place; it ends with the last process that has it.

    Raises:
        UnsupportedSystemError: the system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise lacks("memory cannot be passed to another process")
    return os.memfd_create(name, os.MFD_CLOEXEC)


def named_memory(name: str) -> int:
    """Return an open file in memory that processes of this machine open by the same name; the first one makes it.

    Raises:
        UnsupportedSystemError: the system has none.
    """
    if not _SHARED.is_dir():
        raise lacks("processes cannot share memory by name")
    return os.open(_SHARED / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def forget_memory(name: str) -> None:
    """Take the name from :func:`named_memory`; whoever has it open keeps it."""
    (_SHARED / name).unlink(missing_ok=True)


def new_event(*, counts: bool = False) -> int:
    """Return a descriptor that is readable once :func:`raise_event` was called, until :func:`take_event` is.

    Args:
        counts: Each take answers one raise, and waits where there was none; else a take answers all, and is refused
            with ``BlockingIOError`` where there was none.

    Raises:
        UnsupportedSystemError: the system has none.
    """
    if not hasattr(os, "eventfd"):
        raise lacks("events cannot be passed to another process")
    return os.eventfd(0, os.EFD_CLOEXEC | (os.EFD_SEMAPHORE if counts else os.EFD_NONBLOCK))


def raise_event(fd: int) -> None:
    """Raise an event of :func:`new_event`."""
    os.eventfd_write(fd, 1)


def take_event(fd: int) -> int:
    """Take an event of :func:`new_event`; return how often it was raised, or 1 if takes are counted."""
    return os.eventfd_read(fd)


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
