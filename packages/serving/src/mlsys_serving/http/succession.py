"""A server's part in a succession of generations: it takes connections over, and later gives its own away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from uvicorn.server import ServerState

from mlsys_serving.http.protocol import Connection
from mlsys_serving.processes.generation_link import GenerationLink

_LOOK_S = 0.02  # between two looks if the last connections are gone


class Closable(Protocol):
    """A listening server."""

    def close(self) -> None:
        """Accept nothing more."""
        ...


class Succession:
    """Connections of one server that come from another, and go to the next. Used in the server's event loop.

    Args:
        link: to the master of all generations.
        state: the server's connections.
        connection: makes a connection; its argument: requests have been answered on it before.
        num_running: returns the number of running requests.
    """

    def __init__(
        self,
        link: GenerationLink,
        state: ServerState,
        connection: Callable[[bool], asyncio.Protocol],
        num_running: Callable[[], int],
    ) -> None:
        self._link, self._state, self._connection, self._num_running = link, state, connection, num_running
        self._loop = asyncio.get_running_loop()
        self._joining: set[asyncio.Task[object]] = set()

    async def begin(self, on_retire: Callable[[], None]) -> None:
        """Take over connections, and tell the master that requests are taken; it will have ``on_retire`` called."""
        await self._link.connect()
        self._loop.add_reader(self._link.handover.fileno(), self._adopt)
        self._link.begin(on_retire)

    async def retire(self, servers: Iterable[Closable]) -> None:
        """Accept nothing more, finish what runs, and give all connections away; return when none is left."""
        self._loop.remove_reader(self._link.handover.fileno())
        for server in servers:
            server.close()
        told = 0
        is_first = (
            True  # a connection that was accepted a moment ago is not in the state yet; who asked for this leaves
        )
        while is_first or self._state.connections or self._state.tasks or self._joining:
            for connection in list(self._state.connections):
                if isinstance(connection, Connection):
                    connection.leave(self._give)
            running = self._num_running() - self._link.num_asking  # who asked for the reload is not meant
            if running != told and not is_first:
                self._link.tell_running(running)
                told = running
            is_first = False
            await asyncio.sleep(_LOOK_S)

    def _adopt(self) -> None:
        for taken, is_kept in self._link.handover.take():
            task = self._loop.create_task(self._join(taken, is_kept))
            self._joining.add(task)
            task.add_done_callback(self._joining.discard)

    async def _join(self, taken: socket.socket, is_kept: bool) -> None:
        taken.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: self._connection(is_kept), taken)
        except OSError:  # its client has gone meanwhile
            taken.close()

    def _give(self, fd: int, is_kept: bool) -> bool:
        return self._link.handover.give(fd, is_kept=is_kept)
