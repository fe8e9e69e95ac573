"""Work of the HTTP front beside the event loop: reading bodies, rendering, tokenising, writing answers.

The loop's thread serves every client, so nothing that grows with a request runs on it. Each :class:`ModelService` owns
one :class:`Front`. Small work and large have threads of their own, so that a chat does not wait for a megabyte; large
bodies are admitted by their bytes, before they are read, so that memory is bounded however many come at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import Response
from mlsys_core.errors import ServingError
from pydantic import BaseModel

T = TypeVar("T")

LARGE = 64 * 1024  # bytes or characters from which on work goes to the thread for large work, and bodies are counted
ADMITTED_NBYTES = 32 * 1024 * 1024  # of large bodies at a time
MAX_WAITING_BODIES = 256  # large bodies whose reading has not begun
_TRIMMED = 1024 * 1024  # bytes of a body from which on freed memory is given back to the system afterwards
_NUM_SMALL_THREADS = 2


class TooManyBodiesError(ServingError):
    """More large requests wait to be read than may; try again later."""

    http_status = 429
    error_code = "too_many_large_requests"
    retry_after_s = 1.0

    def __init__(self) -> None:
        super().__init__(
            f"{MAX_WAITING_BODIES} large requests wait to be read, and no more may: try again, or send less than "
            f"{LARGE} bytes"
        )


class Front:
    """Threads for the work of requests, and a budget for the bytes of large ones.

    Args:
        admitted_nbytes: Bytes of large bodies that may be in work at a time; a larger one is admitted alone.
    """

    def __init__(self, *, admitted_nbytes: int = ADMITTED_NBYTES) -> None:
        self._small = ThreadPoolExecutor(_NUM_SMALL_THREADS, thread_name_prefix="orca-front")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="orca-front-large")
        self._admitted_nbytes = admitted_nbytes
        self._held_nbytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def close(self) -> None:
        """End the threads when their work is done. Idempotent."""
        self._small.shutdown(wait=False)
        self._large.shutdown(wait=False)

    async def run(self, call: Callable[..., T], *args: Any, size: int = 0) -> T:
        """Return what ``call(*args)`` does, from a thread of the front.

        Args:
            call: Blocking work.
            args: Its arguments.
            size: Bytes, characters or values that it goes through; from :data:`LARGE` on the thread for large work
                takes it.
        """
        pool = self._large if size >= LARGE else self._small
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(pool, partial(context.run, call, *args))

    async def answer(self, make: Callable[[], BaseModel], *, size: int = 0) -> Response:
        """Return a JSON response of what ``make`` gives; both made and written in a thread of the front.

        Args:
            make: Builds the answer.
            size: As :meth:`run`'s.
        """
        return await self.run(lambda: Response(to_json(make()), media_type="application/json"), size=size)

    @asynccontextmanager
    async def admitted(self, nbytes: int) -> AsyncIterator[None]:
        """Hold ``nbytes`` of the budget for a body while its request is in work; small ones always have room.

        Raises:
            TooManyBodiesError: too many others wait.
        """
        if nbytes < LARGE:
            yield
            return
        held = min(nbytes, self._admitted_nbytes)
        await self._acquire(held)
        try:
            yield
        finally:
            self._release(held)
            if nbytes >= _TRIMMED and not self._held_nbytes:
                # After this turn of the loop, when nothing refers to the body any more.
                asyncio.get_running_loop().call_soon(self._trim)

    async def _acquire(self, nbytes: int) -> None:
        if not self._waiting and self._held_nbytes + nbytes <= self._admitted_nbytes:
            self._held_nbytes += nbytes
            return
        if len(self._waiting) >= MAX_WAITING_BODIES:
            raise TooManyBodiesError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # admitted, and cancelled in the same turn of the loop
                self._release(nbytes)
            else:
                self._waiting.remove((nbytes, turn))
                self._admit_waiting()
            raise

    def _release(self, nbytes: int) -> None:
        self._held_nbytes -= nbytes
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._held_nbytes + self._waiting[0][0] <= self._admitted_nbytes:
            nbytes, turn = self._waiting.popleft()
            if not turn.done():
                self._held_nbytes += nbytes
                turn.set_result(None)

    def _trim(self) -> None:
        with_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give memory back by themselves
        if with_trim is not None:
            try:
                self._large.submit(with_trim, 0)
            except RuntimeError:  # closed meanwhile
                return


def to_json(answer: BaseModel) -> bytes:
    """Return ``answer`` as JSON, piece by piece, so that no answer keeps the interpreter's lock for long.

    Example:
        >>> class Point(BaseModel):
        ...     x: int
        >>> to_json(Point(x=1))
        b'{"x":1}'
    """
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    return "".join(encoder.iterencode(answer)).encode()
