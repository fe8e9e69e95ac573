"""Streams that outlive their connection, and with a journal their server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator

from fastapi import FastAPI, Request, Response
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_orca.api.answers import streamed
from mlsys_orca.api.generation import Generation
from mlsys_orca.api.identity import Identity, given, identity_of, owner_of
from mlsys_orca.api.journal_config import JournalConfig
from mlsys_orca.api.resume import records as rec
from mlsys_orca.api.resume.event_ids import EventId
from mlsys_orca.api.resume.journal import AnswerJournal
from mlsys_orca.api.resume.kept_answer import KeptAnswer
from mlsys_orca.engine.streams import PoisonedRequestError
from mlsys_serving.http import ClosingStreamingResponse, HttpError, runtime_of
from mlsys_serving.http.inside import InsideClient

_log = logging.getLogger(__name__)
_KEEP_S = 600.0
_UNREAD_S = 60.0  # that an answer goes on with nobody reading
_MAX_NBYTES = 64 << 20  # of ended answers
_LOOK_S = 1.0
_FINISH_LOOK_S = 0.05


class AnswerKeeper:
    """The streamed answers of one server that clients may come back to.

    Args:
        journal: Where they are written down; None: only answers that are to wait for their clients are kept, in memory.
        keep_s: Seconds that an ended answer is kept.
    """

    def __init__(self, journal: AnswerJournal | None = None, *, keep_s: float = _KEEP_S) -> None:
        self.journal, self._keep_s = journal, keep_s
        self._answers: dict[str, KeptAnswer] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._is_closed = False
        self._inside: InsideClient | None = None

    @classmethod
    def of(cls, config: JournalConfig | None) -> AnswerKeeper:
        """Return a keeper with the journal of ``config``, if there is one; in the process that serves.

        Raises:
            InvalidInputError: the folder cannot be used, or holds another version's journal.
        """
        if config is None or config.is_passing:
            return cls()
        folder = config.folder / "streams"
        journal = AnswerJournal(
            folder,
            sync=config.sync,
            max_nbytes=config.max_nbytes,
            reach=lambda step: config.reach(f"stream {step}"),
        )
        return cls(journal, keep_s=_KEEP_S if config.keep_s is None else config.keep_s)

    async def streamed(self, request: Request, generation: Generation, events: AsyncGenerator[bytes, None]) -> Response:
        """Return ``events`` as a response; its client may come back to it if there is a journal.

        Raises:
            JournalUnavailableError: the request cannot be written down; its answer has ended.
        """
        if self.journal is None:
            return streamed(generation, events)
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
            JournalUnavailableError: the request cannot be written down; its answer has ended.
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
                opened = rec.Opened(identity.key, path, body, owner, identity.created, identity.seed)
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

    async def get(self, key: str, owner: str) -> KeptAnswer:
        """Return the answer of that key.

        Raises:
            HttpError: 404, there is none, or it is another's.
        """
        if key not in self._answers:
            await self._adopt()
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
        answer = await self.get(event_id.key, owner_of(request))
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
            self._inside = InsideClient(app)
            for state in list(self.journal.state.answers.values()):
                await self._take_up(self._inside, state)

    async def _adopt(self) -> None:
        """Take up the answers of servers that have ended since this one began, as before a reload."""
        if self.journal is not None and self._inside is not None:
            for key in self.journal.adopt():
                if key not in self._answers and (state := self.journal.state.answers.get(key)) is not None:
                    await self._take_up(self._inside, state)

    async def _take_up(self, client: InsideClient, state: rec.AnswerState) -> None:
        assert self.journal is not None
        opened, key = state.opened, state.opened.key
        if state.num_tries >= rec.MAX_TRIES:
            _log.error("the answer %s is given up: %d servers ended while they went on with it", key, rec.MAX_TRIES)
            self.journal.note(rec.Dropped(key))
            return
        self.journal.note(rec.TakenUp(key))
        identity = Identity(key, opened.created, opened.seed, state.known())
        extra = given(identity, opened.owner)
        answer = await client.post(opened.path, opened.body, request_id=key, extra=extra)
        if key not in self._answers:
            why = answer.body[:1000].decode(errors="replace")
            _log.error("the answer %s cannot go on: status %d, %s", key, answer.status, why)
            if answer.status < 500 and answer.status != 429:
                self.journal.note(rec.Dropped(key))

    async def finish(self) -> None:
        """Return when no answer runs any more, read or not: another model is about to take this server's place."""
        while any(answer.ended_s is None for answer in self._answers.values()):
            await asyncio.sleep(_FINISH_LOOK_S)

    async def close(self) -> None:
        """Stop all answers; those that are written down go on with the next server. Idempotent."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for answer in list(self._answers.values()):
            await answer.end("the server has stopped: come back to this stream with Last-Event-ID when it runs again")
        if self.journal is not None:
            self.journal.close()

    def _on_end(self, answer: KeptAnswer, error: Exception | None) -> None:
        if self.journal is None or self._is_closed:
            return
        if error is None:
            self.journal.note(rec.Ended(answer.key))
        elif isinstance(error, InvalidInputError | PoisonedRequestError):
            self.journal.note(rec.Dropped(answer.key))  # another server would do no better

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._adopt()
            except MlsysError as error:  # the disk is full, say: it is tried again
                _log.warning("streams of another server are left for now: %s", error)
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
        if self.journal is not None and answer.key in self.journal.state.answers:
            self.journal.note(rec.Dropped(answer.key))

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
