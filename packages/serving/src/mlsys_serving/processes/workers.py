"""Workers of a server as its front has them: they come from the supervisor, wait as standbys, serve, and die.

Knows no requests: the owner gives standbys their roles, and judges deaths. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from mlsys_core.posix import receive_descriptors

from mlsys_serving.processes.children import Death

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


class Connection(Protocol):
    """The front's end of the socket to one worker."""

    def read(self) -> None:
        """Take what the worker has told."""
        ...

    def close(self) -> None:
        """Close this end, which ends the worker. Idempotent."""
        ...


C = TypeVar("C", bound=Connection)


class Workers(Generic[C]):
    """All workers of a front.

    Args:
        link: To the supervisor.
        connect: Called with a new worker's number, process id and socket; returns the connection.
        promote: Called when a standby has come, or a worker has died and was judged: gives standbys their roles.
        on_death: Called when a worker has died, after all that it had told.
        on_gave_up: Called when no workers are started any more.
    """

    def __init__(
        self,
        link: SupervisorLink,
        *,
        connect: Callable[[int, int, socket.socket], C],
        promote: Callable[[], None],
        on_death: Callable[[C, Death], None],
        on_gave_up: Callable[[], None],
    ) -> None:
        self.standbys: list[C] = []  # the first has waited longest
        self.all: dict[int, C] = {}  # by number
        self._link, self._connect, self._promote = link, connect, promote
        self._on_death, self._on_gave_up = on_death, on_gave_up
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take workers as they come."""
        self._loop = loop
        loop.add_reader(self._link.socket.fileno(), self._on_link)

    def close(self) -> None:
        """Leave all workers, which ends them."""
        if self._loop is not None:
            self._loop.remove_reader(self._link.socket.fileno())
        for each in self.all.values():
            each.close()
        self.standbys = []

    def leave_out(self, connection: C) -> None:
        """Give a standby no role any more, unless it has one."""
        if connection in self.standbys:
            self.standbys.remove(connection)

    def _on_link(self) -> None:
        for message, fd in self._link.receive():
            match message:
                case {"event": "worker", "number": int(number), "pid": int(pid)} if fd is not None:
                    self.all[number] = connection = self._connect(number, pid, socket.socket(fileno=fd))
                    self.standbys.append(connection)
                    self._promote()
                case {"event": "died", "number": int(number)} if number in self.all:
                    death = Death(message["exit_code"], message["signal"], message["is_out_of_memory"])
                    connection = self.all.pop(number)
                    connection.read()
                    connection.close()
                    self.leave_out(connection)
                    self._on_death(connection, death)
                    self._promote()
                case {"event": "gave up"}:
                    self._on_gave_up()
