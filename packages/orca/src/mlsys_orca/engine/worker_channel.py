"""A front's end of the socket to one worker: messages out, reports in, and whether the worker hangs."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from mlsys_orca.engine import wire
from mlsys_serving.processes import FrameChannel, is_stopped
from mlsys_serving.processes.box import Box

_DEAF_S = 5.0  # that a worker may leave a message lying
_BEGIN_S = 60.0  # that it may take to its first message: it has just been forked
_SILENT_S = 10.0  # that it may do nothing while there are requests; a grammar may take some seconds


class WorkerChannel:
    """Connection to one worker process. Used from one event loop.

    Args:
        number: The worker's, at the supervisor.
        pid: Its process id.
        end: The socket, which the channel owns.
        loop: The event loop.
        on_closed: Called once, when the worker has closed its end: it is dead.
    """

    def __init__(
        self,
        number: int,
        pid: int,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        on_closed: Callable[[WorkerChannel], None],
    ) -> None:
        self.number, self.num_sent = number, 0  # messages
        self.is_condemned = False  # the supervisor was asked to kill it
        self.is_stopped = False  # by a signal, when last looked at
        self._pid = pid
        self.on_report: Callable[[wire.Report], None] | None = None  # called with each; set when the worker is to serve
        self.begin()
        self._channel = FrameChannel(end, loop, on_frame=self._on_frame, on_closed=lambda: on_closed(self))

    def begin(self) -> None:
        """Note that the worker is to serve from now on."""
        now = time.monotonic()
        self._seen = 0, now  # messages that it had taken, and since when
        self._heard_s = now  # when it last told something, or had nothing to do

    def send(self, command: wire.Command) -> None:
        """Send a message, as soon as there is room for it."""
        self.num_sent += 1
        self._channel.send(wire.encode(command))

    def hangs(self, box: Box, *, has_work: bool) -> bool:
        """Return whether the worker hangs; ask again and again.

        It does if its iteration takes too long, if it leaves messages lying, if it is silent between iterations, or if
        a signal has stopped it, also when last asked.

        Args:
            box: The worker's.
            has_work: Whether there are requests.
        """
        now, num_received = time.monotonic(), box.num_received
        if num_received >= self.num_sent or num_received != self._seen[0]:
            self._seen = num_received, now
        if not has_work:
            self._heard_s = now
        was_stopped, self.is_stopped = self.is_stopped, has_work and is_stopped(self._pid)
        is_deaf = now - self._seen[1] > (_DEAF_S if num_received else _BEGIN_S)
        is_silent = not box.owners() and now - self._heard_s > _SILENT_S
        return box.is_late() or is_deaf or is_silent or (was_stopped and self.is_stopped)

    def read(self) -> None:
        """Take what the worker has told."""
        self._channel.read()

    def close(self) -> None:
        """Close the front's end. Idempotent."""
        self._channel.close()

    def _on_frame(self, payload: bytes) -> None:
        self._heard_s = time.monotonic()
        report = wire.decode_report(payload)
        if isinstance(report, wire.Waiting):  # it reads no messages meanwhile
            self._seen = self._seen[0], self._heard_s + _SILENT_S
        if self.on_report is not None:
            self.on_report(report)
