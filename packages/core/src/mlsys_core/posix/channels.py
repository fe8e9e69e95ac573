"""Channels between processes of one machine: sockets that pass descriptors, events, memory without a name."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from mlsys_core.posix.lacking import lacks


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
