"""Life of a server: its readiness, its running requests, and their drain and cut.

One :class:`Lifecycle` belongs to one app. The gate asks it whether to let a request in, the supervisor enters each
running request, ``serve`` drains it. All but :attr:`Readiness.state` belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mlsys_core.errors import InvalidInputError, MlsysError

from mlsys_serving.http.errors import HttpError

Check = Callable[[], "str | Awaitable[str | None] | None"]  # None: fine; a string: why not
DrainHook = Callable[[], "Awaitable[None] | None"]


class ReadinessState(Enum):
    """Phase of a server between its start and its end."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # for good: a draining server never becomes ready again


@dataclass(frozen=True, slots=True)
class ReadinessReport:
    """The answer of ``/health/ready``."""

    state: ReadinessState
    checks: dict[str, str]  # by name: "ok", or why not

    @property
    def is_ready(self) -> bool:
        """True if a load balancer should send requests here."""
        return self.state is ReadinessState.READY and all(answer == "ok" for answer in self.checks.values())


class Readiness:
    """Readiness of the server for requests: its state, and named checks of its dependencies.

    The app sets READY when its lifespan has started, and ``serve`` DRAINING on SIGTERM; a model that loads in the
    background adds a check.

    Args:
        check_timeout_s: an asynchronous check that takes longer has failed.

    Example:
        >>> import asyncio
        >>> readiness = Readiness()
        >>> readiness.add_check("model", lambda: "still loading")
        >>> asyncio.run(readiness.report()).checks
        {'model': 'still loading'}
    """

    def __init__(self, *, check_timeout_s: float = 1.0) -> None:
        self._state = ReadinessState.STARTING
        self._checks: dict[str, Check] = {}
        self._check_timeout_s = check_timeout_s

    @property
    def state(self) -> ReadinessState:
        """Current state."""
        return self._state

    def set_ready(self) -> None:
        """Change STARTING to READY; keep any other state."""
        if self._state is ReadinessState.STARTING:
            self._state = ReadinessState.READY

    def set_draining(self) -> None:
        """Change the state to DRAINING, for good."""
        self._state = ReadinessState.DRAINING

    def add_check(self, name: str, check: Check) -> None:
        """Add ``check`` to every report: None means fine, a string is the reason; it must be quick and not block.

        Raises:
            InvalidInputError: ``name`` is taken.
        """
        if name in self._checks:
            raise InvalidInputError(f"there is a readiness check {name!r} already; choose another name")
        self._checks[name] = check

    async def report(self) -> ReadinessReport:
        """Run all checks, at the same time; one that raises has failed, without showing its error's text."""
        names = list(self._checks)
        answers = await asyncio.gather(*(self._ask(self._checks[name]) for name in names))
        return ReadinessReport(self._state, dict(zip(names, answers, strict=True)))

    async def _ask(self, check: Check) -> str:
        try:
            answer = check()
            if inspect.isawaitable(answer):
                answer = await asyncio.wait_for(answer, self._check_timeout_s)
        except TimeoutError:
            return f"no answer in {self._check_timeout_s:g} s"
        except Exception as error:  # noqa: BLE001  (a check comes from a plugin; it may not break the report)
            return f"raised {type(error).__name__}"
        return "ok" if answer is None else answer


class Stoppable(Protocol):
    """A running request, seen by the lifecycle."""

    def stop(self, error: MlsysError) -> None:
        """End the request soon; its client receives ``error``."""
        ...


class Lifecycle:
    """Counts the running requests of one app, and drains them.

    Args:
        readiness: set to not ready when the drain begins.
        on_drain: called once, in this order, when the drain begins (an engine stops taking work from elsewhere).
        on_hook_error: given the exception of such a hook; the drain goes on.
    """

    def __init__(
        self,
        readiness: Readiness,
        *,
        on_drain: Sequence[DrainHook] = (),
        on_hook_error: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self.readiness = readiness
        self._on_hook_error = on_hook_error
        self.startup_error: Exception | None = None  # raised by the app's lifespan during start-up
        self._on_drain = tuple(on_drain)
        self._running: set[Stoppable] = set()
        self._idle: asyncio.Event | None = None  # made by the drain that waits on it

    @property
    def num_running(self) -> int:
        """Number of requests whose handler or stream has not ended."""
        return len(self._running)

    @property
    def is_draining(self) -> bool:
        """True if new requests are refused."""
        return self.readiness.state is ReadinessState.DRAINING

    @contextmanager
    def running(self, request: Stoppable) -> Iterator[None]:
        """Count ``request`` while the context is open."""
        self._running.add(request)
        try:
            yield
        finally:
            self._running.discard(request)
            if not self._running and self._idle is not None:
                self._idle.set()

    async def drain(self, timeout_s: float, *, cut_grace_s: float = 1.0) -> bool:
        """Refuse new requests, wait for the running ones, cut those left after ``timeout_s``.

        Args:
            timeout_s: how long running requests may go on.
            cut_grace_s: how long cut requests may take to clean up.

        Returns:
            Whether every request ended by itself.
        """
        self.readiness.set_draining()
        hooks, self._on_drain = self._on_drain, ()
        await self._run_hooks(hooks, timeout_s)
        if await self._wait_idle(timeout_s):
            return True
        for request in tuple(self._running):
            request.stop(shutting_down("the server is shutting down and its time to finish requests is over"))
        await self._wait_idle(cut_grace_s)
        return False

    async def _run_hooks(self, hooks: Sequence[DrainHook], timeout_s: float) -> None:
        for hook in hooks:
            try:
                result = hook()
                if inspect.isawaitable(result):
                    await asyncio.wait_for(result, timeout_s)
            except Exception as error:  # noqa: BLE001 - a plugin's hook may not keep the server from ending
                self._on_hook_error(error)

    async def _wait_idle(self, timeout_s: float) -> bool:
        self._idle = asyncio.Event()
        if not self._running:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def shutting_down(
    message: str = "the server is shutting down and takes no new requests; try again, or another replica",
) -> HttpError:
    """Return the error of a server that drains: 503, try another one."""
    headers = {"Retry-After": "1", "Connection": "close"}
    return HttpError(message, http_status=503, error_code="shutting_down", headers=headers)
