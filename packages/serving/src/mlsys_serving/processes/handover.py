"""Connections on their way from one process to another: a queue of file descriptors that several processes share.

A server that retires puts its idle connections in, the one that follows takes them out. A client notices nothing: its
connection is never closed, and what it has sent meanwhile waits in the system.
"""

from __future__ import annotations

import socket

from mlsys_core.posix import message_pair, receive_descriptors, send_descriptors

_MAX_FDS = 1


class Handover:
    """Queue of connections; made before the first fork, and inherited.

    Example:
        >>> queue = Handover()
        >>> ours, theirs = socket.socketpair()
        >>> queue.give(ours.fileno(), is_kept=True)
        True
        >>> [(taken, is_kept)] = queue.take()
        >>> ours.close(); _ = taken.send(b"from another process"); theirs.recv(100)
        b'from another process'
    """

    def __init__(self) -> None:
        self._in, self._out = message_pair()
        self._in.setblocking(False)
        self._out.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that is readable while connections wait."""
        return self._out.fileno()

    def give(self, fd: int, *, is_kept: bool) -> bool:
        """Put a connection in; the caller closes its own descriptor. Return False if there is no room now.

        Args:
            fd: The connection's.
            is_kept: It has had requests before, and waits for the next.
        """
        try:
            send_descriptors(self._in, b"k" if is_kept else b"n", [fd])
        except OSError:  # no room in the queue, or too many descriptors are under way
            return False
        return True

    def take(self) -> list[tuple[socket.socket, bool]]:
        """Return the connections that wait, each with ``is_kept``; the caller owns them."""
        taken: list[tuple[socket.socket, bool]] = []
        while True:
            try:
                data, fds = receive_descriptors(self._out, 1, _MAX_FDS)
            except BlockingIOError:
                return taken
            taken += [(socket.socket(fileno=fd), data == b"k") for fd in fds]
