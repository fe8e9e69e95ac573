"""Files: locks, owners, writes at a place, what the disk has and has room for."""

from __future__ import annotations

import os
from pathlib import Path

from mlsys_core.posix.lacking import lacks


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


def sync_data(fd: int) -> None:
    """Wait until the disk has a file's bytes; where the system knows how, without what else is known of it."""
    getattr(os, "fdatasync", os.fsync)(fd)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder; where folders are not opened (Windows), do nothing."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_shared_memory(name: str) -> int:
    """Return a descriptor of the POSIX shared memory of that name, for reading and writing.

    Raises:
        OSError: There is none, this user may not, or the system keeps it elsewhere.
    """
    return os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
