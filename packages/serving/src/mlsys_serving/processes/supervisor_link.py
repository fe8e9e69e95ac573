"""The front's side of its connection to the supervisor: which workers have come, and which have died."""

from __future__ import annotations

import json
import socket
from typing import Any

from mlsys_core.posix import receive_descriptors

MESSAGE_NBYTES = 4096


class SupervisorLink:
    """The front's side of its connection to the supervisor."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        end.setblocking(False)

    def receive(self) -> list[tuple[dict[str, Any], int | None]]:
        """Return the messages that have come, each with the file descriptor that came with it.

        ``{"event": "worker", "number": n, "pid": p}`` with its socket; ``{"event": "died", "number": n, "exit_code":
        ..., "signal": ..., "is_out_of_memory": ...}``; ``{"event": "gave up"}``.
        """
        messages: list[tuple[dict[str, Any], int | None]] = []
        while True:
            try:
                data, fds = receive_descriptors(self.socket, MESSAGE_NBYTES, 1)
            except BlockingIOError:
                return messages
            if not data:
                return messages
            messages.append((json.loads(data), fds[0] if fds else None))

    def kill(self, number: int) -> None:
        """Have worker ``number`` killed."""
        self.socket.send(json.dumps({"kill": number}).encode())
