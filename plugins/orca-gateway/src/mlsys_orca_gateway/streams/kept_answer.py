"""One streamed answer that runs by itself, so that clients may leave and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from mlsys_core.errors import ServingError
from mlsys_orca.api.generation import Generation

from mlsys_orca_gateway.streams.event_ids import EventId, Numbering, Skip, place_of


class KeptAnswer:
    """Events of one answer, from its begin on.

    Args:
        generation: The running answer, which this closes.
        events: Its events, which this reads.
        path: The route that it was asked of.
        body: What was asked, as JSON.
        owner: Digest of the API key that asked.
        waits: It goes on though nobody reads.
        on_end: Called once when it ends by itself, with the error that ended it, if one did.
    """

    def __init__(
        self,
        generation: Generation,
        events: AsyncGenerator[bytes, None],
        *,
        path: str,
        body: bytes,
        owner: str,
        waits: bool,
        on_end: Callable[[KeptAnswer, Exception | None], None],
    ) -> None:
        self.key, self.answer_id = generation.identity.key, generation.answer_id
        self.path, self.body, self.owner, self.waits = path, body, owner, waits
        self.nbytes = len(body)
        self.num_readers = 0
        self.unread_since_s = time.monotonic()
        self.ended_s: float | None = None
        self.error: Exception | None = None  # that ended it
        self._generation, self._events, self._on_end = generation, events, on_end
        self._log: list[tuple[int, EventId, bytes]] = []
        self._more = asyncio.Event()
        self._numbering = Numbering(self.key)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    place = place_of(event)
                    self._log.append((place, self._numbering.next_id(place), event))
                    self.nbytes += len(event) + 256
                    self._tell()
        except Exception as error:  # noqa: BLE001 - its readers raise it
            self.error = error
        finally:
            self._generation.close()
            self.ended_s = time.monotonic()
            self._tell()
        self._on_end(self, self.error)

    def _tell(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, counts: tuple[int, ...] = ()) -> AsyncGenerator[bytes, None]:
        """Yield the events behind those that the reader has, with their ids, as they come.

        Args:
            counts: Events that it has, by place.

        Raises:
            Exception: that ended the answer, after its last event.
        """
        skip, at = Skip(counts), 0
        self.num_readers += 1
        try:
            while True:
                for place, event_id, event in self._log[at:]:
                    at += 1
                    if not skip.has(place):
                        yield b"id: %s\n%s" % (str(event_id).encode(), event)
                if at == len(self._log):
                    if self.ended_s is not None:
                        break
                    await self._more.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.num_readers -= 1
            self.unread_since_s = time.monotonic()

    async def end(self, why: str) -> None:
        """Stop the answer, if it has not ended, and wait until it has; its readers are told why. Idempotent."""
        if self.ended_s is None:
            self.error = ServingError(why)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._generation.close()
