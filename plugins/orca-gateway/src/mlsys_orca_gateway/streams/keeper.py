"""Streams that outlive their connection, and with a journal their server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import FastAPI, Request, Response
from mlsys_core.errors import InvalidInputError, ServingError
from mlsys_orca.api.answers import Generation, Identity, Streams, given, identity_of, owner_of
from mlsys_orca.engine.streams import PoisonedRequestError
from mlsys_serving.http import ClosingStreamingResponse, HttpError, runtime_of

from mlsys_orca_gateway.inside import InsideClient
from mlsys_orca_gateway.streams.event_ids import EventId, Numbering, Skip, place_of
from mlsys_orca_gateway.streams.journal import MAX_TRIES, AnswerJournal, Opened, UnfinishedAnswer

_log = logging.getLogger(__name__)
_KEEP_S = 600.0
_UNREAD_S = 60.0  # that an answer goes on with nobody reading
_MAX_NBYTES = 64 << 20  # of ended answers
_LOOK_S = 1.0


class AnswerKeeper(Streams):
    """The streamed answers of one server that clients may come back to.

    Args:
        keep_s: Seconds that an ended answer is kept.
    """

    def __init__(self, *, keep_s: float = _KEEP_S) -> None:
        self.journal: AnswerJournal | None = None  # None: only answers that are to wait are kept, in memory
        self._keep_s = keep_s
        self._answers: dict[str, KeptAnswer] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._is_closed = False

    async def streamed(self, request: Request, generation: Generation, events: AsyncGenerator[bytes, None]) -> Response:
        """Return ``events`` as a response; its client may come back to it if there is a journal.

        Raises:
            LogUnavailableError: the request cannot be written down; its answer has ended.
        """
        if self.journal is None:
            return await super().streamed(request, generation, events)
        answer = await self.keep(request, generation, events)
        return Response() if identity_of(request) is not None else self.respond(request, answer)

    async def keep(
        self, request: Request, generation: Generation, events: AsyncGenerator[bytes, None], *, waits: bool = False
    ) -> KeptAnswer:
        """Let an answer run by itself.

        Args:
            request: The client's.
            generation: Its running answer.
            events: The answer's events.
            waits: It goes on though nobody reads.

        Raises:
            LogUnavailableError: the request cannot be written down; its answer has ended.
        """
        path, body, owner = request.url.path, await request.body(), owner_of(request)
        identity = generation.identity
        answer = KeptAnswer(generation, events, path=path, body=body, owner=owner, waits=waits, on_end=self._on_end)
        self._answers[answer.key] = answer
        if self.journal is not None:
            journal = self.journal
            for choice in generation.choices:
                choice.tokens.tap = lambda item, index=choice.index: journal.note_item(identity.key, index, item)
            if identity_of(request) is None:
                opened = Opened(identity.key, path, body, owner, identity.created, identity.seed)
                try:
                    await journal.accept(opened)
                except BaseException:
                    await self.cancel(answer)
                    raise
        return answer

    def find(self, key: str, owner: str) -> KeptAnswer | None:
        """Return the answer of that key, if it is its owner who asks."""
        answer = self._answers.get(key)
        return answer if answer is not None and answer.owner == owner else None

    def get(self, key: str, owner: str) -> KeptAnswer:
        """Return the answer of that key.

        Raises:
            HttpError: 404, there is none, or it is another's.
        """
        answer = self.find(key, owner)
        if answer is None:
            raise HttpError(
                f"there is no stream {key[:99]!r}: none was written down, it ended long ago, or is another key's: "
                "leave Last-Event-ID out to ask anew",
                http_status=404,
                error_code="stream_not_found",
            )
        return answer

    async def go_on(self, request: Request) -> Response | None:
        """Return the rest of a stream for a client that has come back to it; None: the request is no such.

        Raises:
            HttpError: 400, the header is no id; 404, there is no such stream; 409, another request is behind it.
        """
        text = request.headers.get("last-event-id")
        if not text:
            return None
        event_id = EventId.parse(text)
        answer = self.get(event_id.key, owner_of(request))
        if request.method == "POST" and (request.url.path, await request.body()) != (answer.path, answer.body):
            raise HttpError(
                "Last-Event-ID names the stream of another request: send that one again, or leave the header out",
                http_status=409,
                error_code="stream_mismatch",
            )
        return self.respond(request, answer, event_id.counts)

    async def start(self, app: FastAPI) -> None:
        """Take up the answers of the server before this one, and begin to forget old ones; the engine runs."""
        self._sweeper = asyncio.create_task(self._sweep())
        if self.journal is not None:
            inside = InsideClient(app)
            for answer in await asyncio.to_thread(self.journal.answers):
                await self._take_up(inside, self.journal, answer)

    async def _take_up(self, client: InsideClient, journal: AnswerJournal, answer: UnfinishedAnswer) -> None:
        opened, key = answer.opened, answer.opened.key
        if answer.num_tries >= MAX_TRIES:
            _log.error("the answer %s is given up: %d servers ended while they went on with it", key, MAX_TRIES)
            journal.drop(key)
            return
        journal.take_up(answer)
        identity = Identity(key, opened.created, opened.seed, answer.known)
        extra = given(identity, opened.owner)
        found = await client.post(opened.path, opened.body, request_id=key, extra=extra)
        if key not in self._answers:
            why = found.body[:1000].decode(errors="replace")
            _log.error("the answer %s cannot go on: status %d, %s", key, found.status, why)
            if found.status < 500 and found.status != 429:
                journal.drop(key)

    async def close(self) -> None:
        """Stop all answers; those that are written down go on with the next server. Idempotent."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for answer in list(self._answers.values()):
            await answer.end("the server has stopped: come back to this stream with Last-Event-ID when it runs again")

    def _on_end(self, answer: KeptAnswer, error: Exception | None) -> None:
        if self.journal is None or self._is_closed:
            return
        if error is None:
            self.journal.end(answer.key)
        elif isinstance(error, InvalidInputError | PoisonedRequestError):
            self.journal.drop(answer.key)  # another server would do no better

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now, nbytes = time.monotonic(), 0
            for answer in reversed(list(self._answers.values())):  # the oldest leave first
                if answer.num_readers:
                    continue
                if answer.ended_s is None:
                    is_old = not answer.waits and now - answer.unread_since_s > _UNREAD_S
                else:
                    nbytes += answer.nbytes
                    is_old = now - answer.ended_s > self._keep_s or nbytes > _MAX_NBYTES
                if is_old:
                    await self.cancel(answer)

    async def cancel(self, answer: KeptAnswer, why: str = "the answer was cancelled") -> None:
        """End an answer and forget it; its readers are told why."""
        self._answers.pop(answer.key, None)
        await answer.end(why)
        if self.journal is not None and not self._is_closed:
            self.journal.drop(answer.key)

    def respond(self, request: Request, answer: KeptAnswer, counts: tuple[int, ...] = ()) -> Response:
        """Return the events of an answer behind those that the client has, by place, as a stream."""

        async def events() -> AsyncGenerator[bytes, None]:
            deadline, clock = request.scope.get("state", {}).get("deadline"), runtime_of(request.app).clock
            try:
                async for event in answer.follow(counts):
                    yield event
            finally:
                if deadline is not None and clock.now() >= deadline and not answer.waits:
                    await self.cancel(answer)

        return ClosingStreamingResponse(events(), media_type="text/event-stream")


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
