"""A generation in no protocol's words: parameters, identity, running answers; answering as the endpoints share it.

An identity is drawn for a client's request, and given for one that the server asks itself: for lines of batches and,
after its death, for the streams of a journal. Such a request says in its scope whose answer it makes.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mlsys_serving.http import ClosingStreamingResponse, runtime_of
from mlsys_serving.http.middleware.gate import presented_keys
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from mlsys_orca.api.logprobs import finite
from mlsys_orca.api.text_stream import FinishReason, TextDelta, TextOptions
from mlsys_orca.engine.streams import KnownAnswer, TokenStream
from mlsys_orca.scheduling.batch import GenerationRequest, SampledToken, SamplingParams
from mlsys_orca.text.guides import Grammar

_SCOPE_KEY = "mlsys.orca.given"


@dataclass(frozen=True, slots=True)
class Identity:
    """All that an answer has by chance: given again, the same answer is made again."""

    key: str  # 32 hexadecimal digits, of the answer's id
    created: int  # seconds since the epoch
    seed: int  # of a request that has none
    known: Mapping[int, KnownAnswer] = field(default_factory=dict)  # by choice: what is known of it already

    @classmethod
    def draw(cls) -> Identity:
        """Return a new one."""
        return cls(uuid.uuid4().hex, int(time.time()), secrets.randbits(63))


@dataclass(frozen=True, slots=True)
class _Given:
    identity: Identity
    owner: str


def given(identity: Identity, owner: str) -> dict[str, Any]:
    """Return the items of the scope of a request that the server asks itself.

    Args:
        identity: The answer's.
        owner: Digest of a key; empty: the answer belongs to all.
    """
    return {_SCOPE_KEY: _Given(identity, owner)}


def identity_of(request: Request) -> Identity | None:
    """Return the identity that a request's answer is given; None: it is a client's, and one is drawn."""
    found: _Given | None = request.scope.get(_SCOPE_KEY)
    return None if found is None else found.identity


def owner_of(request: Request) -> str:
    """Return the digest of the API key that a request came with; empty if the server has no keys."""
    found: _Given | None = request.scope.get(_SCOPE_KEY)
    if found is not None:
        return found.owner
    known = {key.encode() for key in runtime_of(request.app).config.api_keys}
    held = [key for key in presented_keys(request.scope["headers"]) if key in known]
    return hashlib.sha256(b"mlsys-owner" + held[0]).hexdigest() if held else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParameters:
    """Parameters of a generation, in no protocol's words."""

    prefix: str  # of the answer's id
    model: str  # the name that the client gave: the model's or an adapter's
    prompts: Sequence[Sequence[int]] = ()  # token ids; in a finished request at least one prompt of one token
    max_new_tokens: int | None  # None: what the context has room for
    sampling: SamplingParams  # of the first choice; seed and guide are set here
    seed: int | None = None  # None: drawn
    num_choices: int = 1  # of each prompt
    grammar: Grammar | None = None
    ignores_eos: bool = False
    text: TextOptions = field(default_factory=TextOptions)


@dataclass(frozen=True, slots=True)
class Choice:
    """One running answer."""

    index: int  # among all choices of the request
    tokens: TokenStream
    deltas: AsyncGenerator[TextDelta, None]

    @property
    def request(self) -> GenerationRequest:
        """The engine's request behind this answer."""
        return self.tokens.request


@dataclass(frozen=True, slots=True)
class Generation:
    """One accepted request with its running answers. Close it."""

    answer_id: str
    identity: Identity
    model: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_choices: int = 1  # of each prompt

    @property
    def created(self) -> int:
        """Time of its begin, in seconds since the epoch."""
        return self.identity.created

    def close(self) -> None:
        """Cancel what has not finished. Idempotent."""
        for choice in self.choices:
            choice.tokens.close()


DONE = b"data: [DONE]\n\n"
_YIELDS_EVERY = 4  # pieces given between two turns of the event loop
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer, or its stream"}
}


class TokenDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = 0  # those whose keys and values were there already


class Usage(BaseModel):
    """Number of tokens a request cost; a stop token counts as generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


@dataclass(slots=True)
class Spent:
    """Count of the tokens of one request, as they come."""

    generation: Generation
    num_new: int = 0
    num_cached: int = 0  # of the prompts; further choices of a prompt, which find all of it, do not count

    def add(self, index: int, token: SampledToken) -> None:
        """Count a token of the choice ``index``."""
        self.num_new += 1
        if token.num_cached_tokens and index % self.generation.num_choices == 0:
            self.num_cached += token.num_cached_tokens

    @classmethod
    def of(cls, generation: Generation, answers: list[Whole]) -> Spent:
        """Return the count for complete answers."""
        spent = cls(generation)
        for whole in answers:
            for token in whole.tokens:
                spent.add(whole.index, token)
        return spent

    @property
    def usage(self) -> Usage:
        """The counts in OpenAI's shape."""
        num_prompt = self.generation.num_prompt_tokens
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self.num_new,
            total_tokens=num_prompt + self.num_new,
            prompt_tokens_details=TokenDetails(cached_tokens=self.num_cached),
        )


@dataclass(slots=True)
class Whole:
    """One choice's answer, complete."""

    index: int
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    scored: tuple[SampledToken, ...] = ()  # the prompt's tokens but for the first, if they were asked for
    finish_reason: FinishReason = "length"
    stopped_by: str | int | None = None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, which must have been asked for."""
        return sum(finite(token.logprob) for token in self.tokens) / max(1, len(self.tokens))


async def collect(generation: Generation) -> list[Whole]:
    """Run all choices to their end; return their answers by index."""
    try:
        return list(await asyncio.gather(*map(_whole, generation.choices)))
    finally:
        generation.close()


def num_values(answers: list[Whole]) -> int:
    """Return how many numbers and texts ``answers`` are written with, about; looks at one token of each alone."""
    lists = [tokens for whole in answers for tokens in (whole.tokens, whole.scored) if tokens]
    return sum(len(tokens) * (1 + len(tokens[-1].top_logprobs)) for tokens in lists) + len(answers)


async def _whole(choice: Choice) -> Whole:
    whole, texts = Whole(choice.index), []
    async for delta in choice.deltas:
        texts.append(delta.text)
        whole.scored = delta.scored or whole.scored
        if delta.token is not None:
            whole.tokens.append(delta.token)
        if delta.finish_reason is not None:
            whole.finish_reason, whole.stopped_by = delta.finish_reason, delta.stopped_by
    whole.text = "".join(texts)
    return whole


async def merged(generation: Generation) -> AsyncGenerator[tuple[Choice, TextDelta], None]:
    """Yield the pieces of all choices, as they come."""
    if len(generation.choices) == 1:
        async for delta in generation.choices[0].deltas:
            yield generation.choices[0], delta
        return
    queue: asyncio.Queue[tuple[Choice, TextDelta] | BaseException | None] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async for delta in choice.deltas:
                queue.put_nowait((choice, delta))
            queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised below, to the one who reads
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(choice)) for choice in generation.choices]
    try:
        num_left, num_given = len(tasks), 0
        while num_left:
            item = await queue.get()
            num_given += 1
            if num_given % _YIELDS_EVERY == 0:
                await asyncio.sleep(0)  # the others' turn: what waits in the queue would all be written in this one
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


class _Events(AsyncIterator[bytes]):
    """An answer's events; closing it ends the answer, whether or not it was ever read."""

    def __init__(self, generation: Generation, events: AsyncGenerator[bytes, None]) -> None:
        self._generation, self._events = generation, events

    async def __anext__(self) -> bytes:
        return await anext(self._events)

    async def aclose(self) -> None:
        self._generation.close()
        await self._events.aclose()


class Streams:
    """Way of streamed answers to clients: each ends when its client leaves. An extension may put another in its place.

    Example:
        >>> service.streams = KeptStreams()  # doctest: +SKIP
    """

    async def go_on(self, request: Request) -> Response | None:
        """Return the rest of a stream for a client that has come back to it; None: the request is no such."""
        return None

    async def streamed(
        self,
        request: Request,
        generation: Generation,
        events: AsyncGenerator[bytes, None],
    ) -> Response:
        """Return ``events`` as a response."""
        return ClosingStreamingResponse(_Events(generation, events), media_type="text/event-stream")


def event(chunk: BaseModel, *, exclude: set[str] | None = None) -> bytes:
    """Return one server-sent event."""
    return b"data: " + chunk.model_dump_json(exclude=exclude).encode() + b"\n\n"


def named_event(name: str, chunk: BaseModel) -> bytes:
    """Return one server-sent event with a name."""
    return f"event: {name}\n".encode() + event(chunk)
