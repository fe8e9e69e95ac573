"""The supervisor: forks a front and its workers, replaces those that die, and gives up when that does not help.

There is always one worker more than the front uses, a warm standby. The front has a socket to each worker; a worker's
end of it is closed by its death, so that the front notices at once and turns to the standby, while the supervisor
finds out the cause and forks the next. A worker serves one front: where the front dies, all start anew.
"""

from __future__ import annotations

import json
import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from mlsys_core.posix import message_pair, send_descriptors, stream_pair

from mlsys_serving.processes.box import Boxes
from mlsys_serving.processes.children import Child, Standing
from mlsys_serving.processes.recovery import RestartBudget
from mlsys_serving.processes.workers import MESSAGE_NBYTES, SupervisorLink

_log = logging.getLogger(__name__)
_SEND_BUFFER_NBYTES = 4 << 20
EXIT_GAVE_UP = 71


@dataclass(slots=True)
class _Worker:
    number: int
    child: Child
    socket: socket.socket | None  # the front's end, until the front has it


class Supervisor:
    """Parent of one front and its workers.

    Args:
        front: The front's life, in a process of its own; what it returns is the server's exit code.
        worker: A worker's life: its number and its end of the socket to the front. It serves until that is closed.
        num_workers: Workers that the front uses; one more waits.
        boxes: One row for each worker, at its number.
        budget: Limit on restarts.
        standing: Children beside them, already forked; the supervisor owns them from now on.

    Example:
        >>> def front(link: SupervisorLink) -> int:
        ...     return 3
        >>> def worker(number: int, end: socket.socket) -> None:
        ...     end.recv(1)
        >>> Supervisor(front, worker, num_workers=1, boxes=Boxes(4)).run()  # doctest: +SKIP
        3
    """

    def __init__(
        self,
        front: Callable[[SupervisorLink], int],
        worker: Callable[[int, socket.socket], None],
        *,
        num_workers: int,
        boxes: Boxes,
        budget: RestartBudget | None = None,
        standing: Sequence[Standing] = (),
    ) -> None:
        self._standing = standing
        self._run_front, self._run_worker = front, worker
        self._num_workers = num_workers + 1
        self._boxes = boxes
        self._budget = budget or RestartBudget()
        self._workers: dict[int, _Worker] = {}
        self._num_forked = 0
        self._front: Child | None = None
        self._link: socket.socket | None = None  # to the front
        self._starts: list[tuple[float, Callable[[], None]]] = []  # forks to come, at seconds of the monotonic clock
        self._has_given_up = False
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Fork all processes, keep them alive until the front ends, and return its exit code.

        SIGINT and SIGTERM are passed on to the front, which drains and ends.

        Raises:
            ServingError: this process has threads; see :class:`~mlsys_serving.processes.Child`.
        """
        wakeup, wakes = socket.socketpair()
        for end in (wakeup, wakes):
            end.setblocking(False)
        before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        before_fd = signal.set_wakeup_fd(wakes.fileno())
        self._selector.register(wakeup, selectors.EVENT_READ, None)
        try:
            for each in self._standing:
                self._watch(each)
            self._start_all()
            while True:
                code = self._step(wakeup)
                if code is not None:
                    return code
        finally:
            self._end_all()
            self._end_standing()
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            wakeup.close()
            wakes.close()

    def _step(self, wakeup: socket.socket) -> int | None:
        """Wait for one event and handle it; return the exit code when all is over."""
        timeout_s = max(0.0, min(at for at, _ in self._starts) - time.monotonic()) if self._starts else None
        events = self._selector.select(timeout_s)
        for key, _ in events:
            if key.fileobj is wakeup:
                with suppress(BlockingIOError):
                    wakeup.recv(64)
            elif key.data == "front":
                return self._on_front_death()
            elif key.data == "link":
                self._on_message()
            elif isinstance(key.data, Standing):
                self._on_standing_death(key.data)
            else:
                self._on_worker_death(key.data)
        now = time.monotonic()
        due = [start for at, start in self._starts if at <= now]
        self._starts = [(at, start) for at, start in self._starts if at > now]
        for start in due:
            start()
        return None

    def _start_all(self) -> None:
        ours, theirs = message_pair()
        self._link = ours

        def live() -> int:
            for end in (ours, *(worker.socket for worker in self._workers.values())):
                if end is not None:
                    end.close()
            return self._run_front(SupervisorLink(theirs))

        for _ in range(self._num_workers):
            self._fork_worker(told=False)
        self._front = Child("mlsys-front", live)
        theirs.close()
        self._selector.register(self._front.fd, selectors.EVENT_READ, "front")
        self._selector.register(ours, selectors.EVENT_READ, "link")
        for worker in self._workers.values():
            self._introduce(worker)
        if self._is_stopping:  # the signal came before there was a front to pass it on to
            self._front.send_signal(signal.SIGTERM)

    def _fork_worker(self, *, told: bool = True) -> None:
        number, self._num_forked = self._num_forked, self._num_forked + 1
        self._boxes.box(number).clear()
        ours, theirs = stream_pair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_NBYTES)
        others = [worker.socket for worker in self._workers.values() if worker.socket is not None]

        def live() -> None:
            # Whoever held these open would hide the death of their owners.
            for end in (ours, self._link, *others):
                if end is not None:
                    end.close()
            self._run_worker(number, theirs)

        child = Child("mlsys-worker", live)
        theirs.close()
        worker = self._workers[number] = _Worker(number, child, ours)
        self._selector.register(child.fd, selectors.EVENT_READ, number)
        if told:
            self._introduce(worker)

    def _introduce(self, worker: _Worker) -> None:
        """Give the front its end of the worker's socket."""
        if self._link is not None and worker.socket is not None:
            message = json.dumps({"event": "worker", "number": worker.number, "pid": worker.child.pid}).encode()
            with suppress(OSError):  # the front is dead, which the next step finds
                send_descriptors(self._link, message, [worker.socket.fileno()])
            worker.socket.close()
            worker.socket = None

    def _tell(self, **message: Any) -> None:
        if self._link is not None:
            with suppress(OSError):
                self._link.send(json.dumps(message).encode())

    def _on_message(self) -> None:
        if self._link is None:
            return
        with suppress(OSError):
            data = self._link.recv(MESSAGE_NBYTES)
            worker = self._workers.get(json.loads(data)["kill"]) if data else None
            if worker is not None:
                worker.child.send_signal(signal.SIGKILL)
            if not data:
                self._selector.unregister(self._link)

    def _on_worker_death(self, number: int) -> None:
        worker = self._workers.pop(number)
        self._selector.unregister(worker.child.fd)
        death = worker.child.wait()
        if worker.socket is not None:
            worker.socket.close()
        if death.exit_code != 0:  # else the front has closed its socket
            _log.warning("worker %d has died: %s", number, death)
        self._tell(
            event="died",
            number=number,
            exit_code=death.exit_code,
            signal=death.signal,
            is_out_of_memory=death.is_out_of_memory,
        )
        self._plan_start(self._fork_worker)

    def _watch(self, standing: Standing) -> None:
        assert standing.child is not None
        self._selector.register(standing.child.fd, selectors.EVENT_READ, standing)

    def _on_standing_death(self, standing: Standing) -> None:
        assert standing.child is not None
        self._selector.unregister(standing.child.fd)
        child, standing.child = standing.child, None
        _log.warning("%s has died: %s", standing.name, child.wait())
        self._plan_start(lambda: self._fork_standing(standing))

    def _fork_standing(self, standing: Standing) -> None:
        ends = [worker.socket for worker in self._workers.values() if worker.socket is not None]
        standing.fork([*ends, *([] if self._link is None else [self._link])])
        self._watch(standing)

    def _end_standing(self) -> None:
        for each in self._standing:
            if each.child is not None:
                self._selector.unregister(each.child.fd)
            each.end()

    def _plan_start(self, start: Callable[[], None]) -> None:
        delay_s = self._budget.delay_s(time.monotonic())
        if delay_s is None:
            self._give_up()
        elif delay_s:
            self._starts.append((time.monotonic() + delay_s, start))
        else:
            start()

    def _on_front_death(self) -> int | None:
        assert self._front is not None
        self._selector.unregister(self._front.fd)
        death = self._front.wait()
        self._front = None
        if self._has_given_up:
            return EXIT_GAVE_UP
        if death.exit_code is not None or self._is_stopping:
            return death.exit_code if death.exit_code is not None else 128 + (death.signal or 0)
        _log.error("the front has died: %s; all processes start anew", death)
        self._end_all()
        delay_s = self._budget.delay_s(time.monotonic())
        if delay_s is None:
            return EXIT_GAVE_UP
        time.sleep(delay_s)
        self._start_all()
        return None

    def _give_up(self) -> None:
        if self._has_given_up:
            return
        self._has_given_up = True
        _log.error(
            "%d processes have died within %.0f s: the server gives up", self._budget.max_deaths, self._budget.window_s
        )
        self._tell(event="gave up")
        if self._front is not None:
            self._front.send_signal(signal.SIGTERM)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._is_stopping = True
        if self._front is not None:
            self._front.send_signal(number)

    def _end_all(self) -> None:
        """End the front and the workers, which hold nothing that would be lost."""
        self._starts = [(at, start) for at, start in self._starts if start != self._fork_worker]
        children = [worker.child for worker in self._workers.values()]
        for worker in self._workers.values():
            self._selector.unregister(worker.child.fd)
            if worker.socket is not None:
                worker.socket.close()
        self._workers.clear()
        if self._front is not None:
            self._selector.unregister(self._front.fd)
            children.append(self._front)
            self._front = None
        for child in children:
            child.send_signal(signal.SIGKILL)
        for child in children:
            child.wait()
        if self._link is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._link)
            self._link.close()
            self._link = None
