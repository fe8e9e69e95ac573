"""One generation's side of its connection to the master: it says when it is ready, asks for the next, hears of both.

Its messages are JSON. Every change of state is told to all fronts as one whole status, so none depends on another.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mlsys_core.errors import MlsysError, ServingError

from mlsys_serving.processes.handover import Handover

MESSAGE_NBYTES = 1 << 16


class ReloadRefusedError(ServingError):
    """A reload is under way, or the generation before still finishes its requests; try again later."""

    http_status = 409
    error_code = "reload_under_way"


class ReloadFailedError(ServingError):
    """The next generation could not start; the one before goes on."""

    error_code = "reload_failed"

    def __init__(self, message: str, *, is_input_error: bool) -> None:
        super().__init__(message)
        self.http_status = 400 if is_input_error else 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of a reload."""

    token: str  # of the one who asked
    number: int  # the new generation's
    seconds: float  # from its fork until it took requests, or until it ended
    error: str | None = None  # None: it took requests
    is_input_error: bool = False  # what was asked for cannot be


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStatus:
    """State of all generations, as the master sees it."""

    number: int  # of the generation that is told
    serving: int | None = None  # number of the one that takes requests
    loading: int | None = None
    retiring: Mapping[str, int] = field(default_factory=dict)  # number -> requests that still run
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the generation that is told
    outcome: Outcome | None = None  # of the last reload
    is_retired: bool = False  # the generation that is told is to take no more requests, and end with its last


class GenerationLink:
    """A generation's connection to the master, used by the process that loads, then by its front.

    Args:
        end: The generation's end of the socket.
        number: The generation's; the first is 1.
        is_alone: No other serves while this one loads.
        handover: The queue of connections that all generations share.
    """

    def __init__(self, end: socket.socket, number: int, *, is_alone: bool, handover: Handover) -> None:
        end.setblocking(False)
        self.number, self.is_alone, self.handover = number, is_alone, handover
        self.status = GenerationStatus(number=number)
        self._end = end
        self._on_retire: Callable[[], None] | None = None
        self._changed: asyncio.Event | None = None  # set, and replaced, with each status
        self._refused: dict[str, str] = {}  # token -> why
        self.num_asking = 0  # calls of reload() under way

    def fail(self, error: MlsysError) -> None:
        """Say why this generation cannot start."""
        self._tell(event="failed", message=str(error), exit_code=error.exit_code)

    async def connect(self) -> GenerationStatus:
        """Follow the master's messages in the running event loop; return the state of all generations. Idempotent."""
        if self._changed is None:
            self._changed = asyncio.Event()
            asyncio.get_running_loop().add_reader(self._end.fileno(), self._on_message)
            self._tell(event="hello")
            await self._changed.wait()
        return self.status

    def begin(self, on_retire: Callable[[], None]) -> None:
        """Say that requests are taken; :meth:`connect` before.

        Args:
            on_retire: Called once: take no more requests, and end when the running ones have ended.
        """
        self._on_retire = on_retire
        self._tell(event="ready")

    def tell_running(self, number: int) -> None:
        """Tell how many requests a retiring generation still has."""
        self._tell(event="running", number=number)

    def keep(self, changes: Mapping[str, Any]) -> None:
        """Change the settings with which this generation would be started again."""
        self._tell(event="settings", changes=dict(changes))

    async def reload(self, changes: Mapping[str, Any]) -> Outcome:
        """Have the next generation started, with these settings changed; return when it takes requests.

        Raises:
            ReloadRefusedError: another reload is under way.
            ReloadFailedError: it could not start; the message is its own.
        """
        assert self._changed is not None, "connect first"
        token = secrets.token_hex(8)
        self._tell(event="reload", changes=dict(changes), token=token)
        self.num_asking += 1
        try:
            while (outcome := self.status.outcome) is None or outcome.token != token:
                if token in self._refused:
                    raise ReloadRefusedError(self._refused.pop(token))
                await self._changed.wait()
        finally:
            self.num_asking -= 1
        if outcome.error is not None:
            raise ReloadFailedError(outcome.error, is_input_error=outcome.is_input_error)
        return outcome

    def _tell(self, **message: Any) -> None:
        data = json.dumps(message).encode()
        with suppress(OSError):  # the master is gone, and this process with it
            self._end.send(data)

    def _on_message(self) -> None:
        while True:
            try:
                data = self._end.recv(MESSAGE_NBYTES)
            except BlockingIOError:
                break
            if not data:
                break
            message = json.loads(data)
            if "refused" in message:
                self._refused[message["token"]] = message["refused"]
                continue
            outcome = message.pop("outcome")
            self.status = GenerationStatus(**message, outcome=None if outcome is None else Outcome(**outcome))
        assert self._changed is not None
        self._changed.set()
        self._changed = asyncio.Event()
        if self.status.is_retired and self._on_retire is not None:
            on_retire, self._on_retire = self._on_retire, None
            on_retire()
