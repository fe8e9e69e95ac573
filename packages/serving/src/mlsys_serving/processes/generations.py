"""The master: forks one generation of a server after the other, each with settings of its own.

A generation is a whole server: it loads what it serves, and forks its processes. The master loads nothing; it keeps the
listening socket open, so that no connection is lost, and its memory clean, so that the next generation begins as the
first did. A reload forks the next generation, which loads while the one before serves. When it takes requests the one
before is told to retire: it takes no more, finishes what runs, and ends. If it cannot start, nothing has changed.
"""

from __future__ import annotations

import json
import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from types import FrameType
from typing import Any

from mlsys_core.errors import InvalidInputError, MlsysError, ServingError
from mlsys_core.posix import has_terminal, message_pair

from mlsys_serving.processes.children import Child, Death
from mlsys_serving.processes.generation_link import MESSAGE_NBYTES, GenerationLink, GenerationStatus, Outcome
from mlsys_serving.processes.handover import Handover
from mlsys_serving.processes.restarts import RestartBudget
from mlsys_serving.processes.supervisor import EXIT_GAVE_UP

_log = logging.getLogger(__name__)
_RETRY_S = 0.05  # between two tries to tell a front that does not read
_ENDING = (signal.SIGINT, signal.SIGTERM)


class _State(Enum):
    LOADING = "loading"
    SERVING = "serving"
    RETIRING = "retiring"


@dataclass(slots=True)
class _Generation:
    number: int
    settings: dict[str, Any]
    token: str  # of the one who asked for it
    child: Child
    socket: socket.socket  # the master's end
    started_s: float  # of the monotonic clock
    state: _State = _State.LOADING
    num_running: int = 0  # requests, once it retires
    failure: tuple[str, int] | None = None  # why it could not start, and its exit code


class Generations:
    """Parent of a server's generations; loads nothing, and has a single thread.

    Args:
        live: A generation's life, in a process of its own: its settings and its link to the master. What it returns is
            its exit code; an ``MlsysError`` that it raises is told to who asked for it.
        settings: Of the first one; what JSON can say.
        budget: Limit on restarts of a generation that somebody has killed.

    Example:
        >>> Generations(lambda settings, link: 3, {}).run()  # doctest: +SKIP
        3
    """

    def __init__(
        self,
        live: Callable[[Mapping[str, Any], GenerationLink], int],
        settings: Mapping[str, Any],
        *,
        budget: RestartBudget | None = None,
    ) -> None:
        self._run_generation = live
        self._settings = dict(settings)
        self._budget = budget or RestartBudget()
        self._handover = Handover()
        self._generations: dict[int, _Generation] = {}
        self._num_forked = 0
        self._outcome: Outcome | None = None
        self._exit_code = 0
        self.has_served = False  # one of them took requests
        self._failure: tuple[str, int] | None = None  # of the only generation there was
        self._owed: set[int] = set()  # generations whose last status had no room
        self._is_stopping = False
        self._wants_reload = False
        self._had_terminal = has_terminal()
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Fork the first generation, follow signals and fronts until none is left, and return the last one's exit code.

        SIGINT and SIGTERM are passed on to every generation; SIGHUP starts the next one with the same settings.

        Raises:
            ServingError: the first one could not start: its message and exit code; or this process has threads.
        """
        with self._signals() as wakeup:
            self._selector.register(wakeup, selectors.EVENT_READ, None)
            try:
                self._fork(self._settings, token="")
                while self._generations:
                    self._step(wakeup)
            finally:
                for generation in list(self._generations.values()):
                    generation.child.send_signal(signal.SIGKILL)
                    self._remove(generation)
                self._selector.close()
        if self._failure is not None:
            error = ServingError(self._failure[0])
            error.exit_code = self._failure[1]
            raise error
        return self._exit_code

    def _step(self, wakeup: socket.socket) -> None:
        for key, _ in self._selector.select(_RETRY_S if self._owed else None):
            if key.fileobj is wakeup:
                with suppress(BlockingIOError):
                    wakeup.recv(64)
            elif (generation := self._generations.get(key.data)) is not None:
                if key.fileobj is generation.socket:
                    self._read(generation)
                else:
                    self._on_death(generation)
        if self._wants_reload:
            self._wants_reload = False
            refusal = self._reload({}, token="")
            _log.warning("SIGHUP: %s", refusal or "the next generation is started")
        if self._owed:
            self._broadcast()

    # --- generations

    def _find(self, state: _State) -> _Generation | None:
        return next((each for each in self._generations.values() if each.state is state), None)

    def _fork(self, settings: dict[str, Any], *, token: str) -> None:
        self._num_forked += 1
        number, is_alone = self._num_forked, self._find(_State.SERVING) is None
        ours, theirs = message_pair()
        ours.setblocking(False)
        others = [generation.socket for generation in self._generations.values()]

        def live() -> int:
            for end in (ours, *others):
                end.close()
            link = GenerationLink(theirs, number, is_alone=is_alone, handover=self._handover)
            try:
                return self._run_generation(settings, link)
            except MlsysError as error:
                link.fail(error)
                return error.exit_code

        started_s = time.monotonic()
        child = Child("mlsys-generation", live)
        theirs.close()
        self._generations[number] = _Generation(number, settings, token, child, ours, started_s)
        if self._is_stopping:  # the signal came while this one was forked
            child.send_signal(signal.SIGTERM)
        self._selector.register(child.fd, selectors.EVENT_READ, number)
        self._selector.register(ours, selectors.EVENT_READ, number)
        if self._is_stopping:  # the signal came while it was forked
            child.send_signal(signal.SIGTERM)
        self._broadcast()

    def _reload(self, changes: Mapping[str, Any], *, token: str) -> str | None:
        """Start the next generation; return why not, if not."""
        serving, loading, retiring = (self._find(state) for state in (_State.SERVING, _State.LOADING, _State.RETIRING))
        if self._is_stopping:
            return "the server is shutting down"
        if loading is not None or serving is None:
            return "a generation of this server is being started already; wait until it serves"
        if retiring is not None:
            return (
                f"the generation before still finishes {retiring.num_running} requests, and a third one at a time is "
                "not started; wait until they have ended"
            )
        self._fork(serving.settings | dict(changes), token=token)
        return None

    def _read(self, generation: _Generation) -> None:
        """Follow a generation's messages."""
        while True:
            try:
                data = generation.socket.recv(MESSAGE_NBYTES)
            except OSError:
                return
            if not data:  # nobody has its end any more: it is dead, which its child tells
                with suppress(KeyError):
                    self._selector.unregister(generation.socket)
                return
            message = json.loads(data)
            match message["event"]:
                case "hello":  # a front begins, the first or one that its supervisor has started anew
                    self._tell(generation)
                case "ready":
                    self._on_ready(generation)
                case "failed":
                    generation.failure = message["message"], message["exit_code"]
                case "running":
                    generation.num_running = message["number"]
                    self._broadcast()
                case "settings":
                    generation.settings = generation.settings | message["changes"]
                    self._broadcast()
                case "reload":
                    token = message["token"]
                    refusal = self._reload(message["changes"], token=token)
                    if refusal is not None:
                        with suppress(OSError):
                            generation.socket.send(json.dumps({"refused": refusal, "token": token}).encode())

    def _on_ready(self, generation: _Generation) -> None:
        if generation.state is _State.LOADING:
            before = self._find(_State.SERVING)
            if before is not None:
                before.state = _State.RETIRING
            generation.state, self.has_served = _State.SERVING, True
            self._end_reload(generation)
        self._broadcast()

    def _end_reload(self, generation: _Generation, error: str | None = None, *, is_input_error: bool = False) -> None:
        self._outcome = Outcome(
            token=generation.token,
            number=generation.number,
            seconds=time.monotonic() - generation.started_s,
            error=error,
            is_input_error=is_input_error,
        )

    def _on_death(self, generation: _Generation) -> None:
        self._read(generation)  # its last words
        death = self._remove(generation)
        code = death.exit_code if death.exit_code is not None else 128 + (death.signal or 0)
        match generation.state:
            case _State.LOADING:
                self._on_failure(generation, death, code)
            case _State.RETIRING:
                if code:
                    _log.warning("generation %d has died (%s) before its requests had ended", generation.number, death)
            case _State.SERVING:
                self._exit_code = code
                self._replace(generation, death)
        self._broadcast()

    def _on_failure(self, generation: _Generation, death: Death, code: int) -> None:
        if generation.failure is not None:
            message, code = generation.failure
        else:
            message = f"the next generation has died while it started ({death}); the server's log has more"
        self._end_reload(generation, message, is_input_error=code == InvalidInputError.exit_code)
        if self._generations:
            _log.error("generation %d cannot start: %s", generation.number, message)
            return
        if not self.has_served:
            self._exit_code = code
        if generation.failure is not None and not self._is_stopping:
            self._failure = generation.failure

    def _replace(self, generation: _Generation, death: Death) -> None:
        """Have a generation that was killed follow itself; one that has ended is followed by one that loads, if any."""
        if self._is_stopping or self._find(_State.LOADING) is not None:
            return
        delay_s = self._budget.delay_s(time.monotonic()) if death.exit_code is None else None
        if delay_s is not None:
            _log.error("generation %d has died: %s; the next one is started", generation.number, death)
            time.sleep(delay_s)
            self._fork(generation.settings, token="")
            return
        if death.exit_code is None:
            self._exit_code = EXIT_GAVE_UP
        for other in self._generations.values():  # that retire: they finish what runs, as long as they may
            other.child.send_signal(signal.SIGTERM)

    def _remove(self, generation: _Generation) -> Death:
        self._selector.unregister(generation.child.fd)
        with suppress(KeyError):
            self._selector.unregister(generation.socket)
        generation.socket.close()
        self._owed.discard(generation.number)
        del self._generations[generation.number]
        return generation.child.wait()

    # --- what fronts are told

    def _broadcast(self) -> None:
        """Tell every front the state of all; again later if one has no room."""
        self._owed.clear()
        for generation in self._generations.values():
            if generation.state is not _State.LOADING:  # which asks when it has a front
                self._tell(generation)

    def _tell(self, generation: _Generation) -> None:
        serving, loading = self._find(_State.SERVING), self._find(_State.LOADING)
        status = GenerationStatus(
            number=generation.number,
            serving=None if serving is None else serving.number,
            loading=None if loading is None else loading.number,
            retiring={
                str(each.number): each.num_running
                for each in self._generations.values()
                if each.state is _State.RETIRING
            },
            settings=generation.settings,
            outcome=self._outcome,
            is_retired=generation.state is _State.RETIRING,
        )
        try:
            generation.socket.send(json.dumps(asdict(status)).encode())
        except BlockingIOError:
            self._owed.add(generation.number)
        except OSError:
            return  # it is dead, which the next step finds

    # --- signals

    @contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """Have signals followed; yields a socket that is readable when one has come."""
        wakeup, wakes = socket.socketpair()
        for end in (wakeup, wakes):
            end.setblocking(False)
        before = {number: signal.signal(number, self._on_signal) for number in (*_ENDING, signal.SIGHUP)}
        before_fd = signal.set_wakeup_fd(wakes.fileno())
        try:
            yield wakeup
        finally:
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            wakeup.close()
            wakes.close()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and not (self._had_terminal and not has_terminal()):
            self._wants_reload = True
            return
        if number == signal.SIGHUP and self._is_stopping:
            return  # the system tells a session's leader twice, and a second signal means at once
        self._is_stopping = True
        for generation in list(self._generations.values()):
            generation.child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
