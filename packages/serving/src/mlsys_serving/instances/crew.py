"""Workers come and go: each instance of a model has one, and the next takes over when it dies.

The crew knows no requests; it tells its owner what workers say and when they die. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from mlsys_serving.instances.members import OUT_S, Instance, Message, Roles, Worker, decode, encode
from mlsys_serving.processes.channel import FrameChannel
from mlsys_serving.processes.children import Death, is_stopped
from mlsys_serving.processes.workers import SupervisorLink, Workers

_log = logging.getLogger(__name__)
_WATCH_S = 0.5
_MOST_FAILED_STARTS = 3  # of an instance's processes, before the first that serves


class Crew:
    """All instances of all models, and their workers.

    Args:
        num_groups: Models.
        roles: Cores and memory of instances.
        link: To the supervisor.
        on_message: Called with what an instance's worker says, but for its first message.
        on_ready: Called when an instance takes requests.
        on_death: Called when an instance's worker has died.
        on_gave_up: Called when no workers are started any more.
    """

    def __init__(
        self,
        num_groups: int,
        roles: Roles,
        link: SupervisorLink,
        *,
        on_message: Callable[[Instance, Message], None],
        on_ready: Callable[[Instance], None],
        on_death: Callable[[Instance, Death], None],
        on_gave_up: Callable[[], None],
    ) -> None:
        self.instances = [
            Instance(group, number, group * len(roles.cores) + number)
            for group in range(num_groups)
            for number in range(len(roles.cores))
        ]
        self._roles, self._link = roles, link
        self._tell_message, self._tell_ready, self._tell_death = on_message, on_ready, on_death
        self._workers = Workers(
            link, connect=self._connect, promote=self._promote, on_death=self._on_death, on_gave_up=on_gave_up
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Take workers as they come, in the running event loop. Idempotent."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._workers.open(self._loop)
            self._watcher = self._loop.create_task(self._watch())

    def close(self) -> None:
        """Leave all workers, which ends them."""
        if self._loop is not None and self._watcher is not None:
            self._watcher.cancel()
            self._workers.close()

    async def _watch(self) -> None:
        """Have workers killed that a signal has stopped, when requests wait for them."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for worker in self._workers.all.values():
                has_work = worker.instance is not None and bool(worker.instance.ledger.running)
                is_now = has_work and is_stopped(worker.pid)
                if is_now and worker.was_stopped:
                    with suppress(OSError):
                        self._link.kill(worker.number)
                worker.was_stopped = is_now

    def _connect(self, number: int, pid: int, end: socket.socket) -> Worker:
        assert self._loop is not None

        def on_frame(payload: bytes) -> None:
            instance, message = worker.instance, decode(payload)
            if instance is not None and message.kind == "ready":
                instance.is_ready = instance.has_served = True
                self._tell_ready(instance)
            elif instance is not None:
                self._tell_message(instance, message)

        channel = FrameChannel(end, self._loop, on_frame=on_frame, on_closed=lambda: None)  # the supervisor tells why
        worker = Worker(number, pid, channel)
        return worker

    def _promote(self) -> None:
        """Give roles that nobody has to standbys."""
        for instance in self.instances:
            if instance.worker is None and instance.may_start and self._workers.standbys:
                worker = self._workers.standbys.pop(0)
                worker.instance, instance.worker = instance, worker
                pages = self._roles.num_pages
                role = {
                    "group": instance.group,
                    "cores": list(self._roles.cores[instance.number]),
                    "first_page": (len(self.instances) + instance.index) * pages,
                    "num_pages": pages,
                }
                worker.channel.send(encode(Message("start", role)))

    def _on_death(self, worker: Worker, death: Death) -> None:
        instance = worker.instance
        if instance is None:
            return
        instance.num_failed_starts += int(not instance.is_ready)
        instance.worker, instance.is_ready = None, False
        if death.is_crash:
            self._hold_back(instance)
        self._tell_death(instance, death)

    def _hold_back(self, instance: Instance) -> None:
        """Let an instance that crashes often wait, and leave it out if that does not help."""
        assert self._loop is not None
        delay_s = instance.budget.delay_s(time.monotonic())
        if delay_s == 0:
            return
        instance.may_start, instance.is_out = False, delay_s is None
        if instance.is_out:
            _log.error("an instance has crashed again and again, and is left out for %.0f s", OUT_S)
        self._loop.call_later(OUT_S if delay_s is None else delay_s, self._let_in, instance)

    def _let_in(self, instance: Instance) -> None:
        instance.may_start, instance.is_out = True, False
        self._promote()


def cannot_start(instance: Instance) -> bool:
    """Return whether an instance's processes end before they take requests, each time."""
    return not instance.has_served and instance.num_failed_starts >= _MOST_FAILED_STARTS
