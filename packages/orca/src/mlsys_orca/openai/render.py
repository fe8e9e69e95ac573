"""Answers from generations: whole, and as the events of a stream."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from pydantic import BaseModel

from mlsys_orca.batch import SampledToken
from mlsys_orca.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from mlsys_orca.openai.service import Generation
from mlsys_orca.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # for minus infinity, which JSON has not; the protocol's own stand-in


async def collect(generation: Generation) -> tuple[str, list[SampledToken], FinishReason]:
    """Run a generation to its end: its text, tokens and finish reason."""
    texts, tokens = [], []
    async with aclosing(generation.deltas) as deltas:
        async for delta in deltas:
            texts.append(delta.text)
            if delta.token is not None:
                tokens.append(delta.token)
            if delta.finish_reason is not None:
                return "".join(texts), tokens, delta.finish_reason
    raise AssertionError("a generation ends with a finish reason")


async def chat_completion(generation: Generation, model: str, tokenizer: Tokenizer) -> ChatCompletion:
    """The whole answer of a chat request."""
    text, tokens, finish_reason = await collect(generation)
    choice = ChatChoice(
        message=ChatMessage(content=text),
        logprobs=_chat_logprobs(generation, tokens, tokenizer),
        finish_reason=finish_reason,
    )
    return ChatCompletion(
        id=generation.answer_id,
        created=generation.created,
        model=model,
        choices=[choice],
        usage=_usage(generation, tokens),
    )


async def completion(generation: Generation, model: str, tokenizer: Tokenizer) -> Completion:
    """The whole answer of a completion request."""
    text, tokens, finish_reason = await collect(generation)
    logprobs = _completion_logprobs(generation, tokens, tokenizer, offset=0)
    return Completion(
        id=generation.answer_id,
        created=generation.created,
        model=model,
        choices=[CompletionChoice(text=text, logprobs=logprobs, finish_reason=finish_reason)],
        usage=_usage(generation, tokens),
    )


async def chat_events(
    generation: Generation, model: str, tokenizer: Tokenizer, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """A chat answer as server-sent events, ``[DONE]`` last."""

    def event(choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        chunk = ChatCompletionChunk(
            id=generation.answer_id, created=generation.created, model=model, choices=choices, usage=usage
        )
        return _event(chunk, include_usage=include_usage)

    tokens: list[SampledToken] = []
    pending: list[SampledToken] = []  # tokens whose text has not been sent
    yield event([ChatChunkChoice(delta=ChatDelta(role="assistant", content=""))])
    async with aclosing(generation.deltas) as deltas:
        async for delta in deltas:
            if delta.token is not None:
                tokens.append(delta.token)
                pending.append(delta.token)
            if delta.text or (pending and delta.finish_reason and generation.request.sampling.num_logprobs is not None):
                logprobs = _chat_logprobs(generation, pending, tokenizer)
                yield event([ChatChunkChoice(delta=ChatDelta(content=delta.text), logprobs=logprobs)])
                pending = []
            if delta.finish_reason is not None:
                yield event([ChatChunkChoice(delta=ChatDelta(), finish_reason=delta.finish_reason)])
    if include_usage:
        yield event([], _usage(generation, tokens))
    yield b"data: [DONE]\n\n"


async def completion_events(
    generation: Generation, model: str, tokenizer: Tokenizer, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """A completion as server-sent events, ``[DONE]`` last."""

    def event(choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        chunk = Completion(
            id=generation.answer_id, created=generation.created, model=model, choices=choices, usage=usage
        )
        return _event(chunk, include_usage=include_usage)

    tokens: list[SampledToken] = []
    pending: list[SampledToken] = []
    offset = 0
    async with aclosing(generation.deltas) as deltas:
        async for delta in deltas:
            if delta.token is not None:
                tokens.append(delta.token)
                pending.append(delta.token)
            if delta.text or delta.finish_reason is not None:
                logprobs = _completion_logprobs(generation, pending, tokenizer, offset=offset)
                yield event([CompletionChoice(text=delta.text, logprobs=logprobs, finish_reason=delta.finish_reason)])
                offset += len(delta.text)
                pending = []
    if include_usage:
        yield event([], _usage(generation, tokens))
    yield b"data: [DONE]\n\n"


def _event(chunk: BaseModel, *, include_usage: bool) -> bytes:
    """One event; with ``include_usage`` every chunk carries the field, null but in the last, as the protocol says."""
    if include_usage:
        return b"data: " + chunk.model_dump_json().encode() + b"\n\n"
    return b"data: " + chunk.model_dump_json(exclude={"usage"}).encode() + b"\n\n"


def _usage(generation: Generation, tokens: Sequence[SampledToken]) -> Usage:
    return Usage.of(len(generation.request.prompt_token_ids), len(tokens))


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else _LEAST_LOGPROB


def _chat_logprobs(generation: Generation, tokens: Sequence[SampledToken], tokenizer: Tokenizer) -> ChatLogprobs | None:
    if generation.request.sampling.num_logprobs is None:
        return None

    def entry(token_id: int, logprob: float | None) -> TopLogprob:
        text = tokenizer.decode([token_id], skip_special=False)
        return TopLogprob(token=text, logprob=_finite(logprob), bytes=list(text.encode()))

    content = []
    for token in tokens:
        top = [entry(token_id, logprob) for token_id, logprob in token.top_logprobs]
        content.append(TokenLogprob(**entry(token.token_id, token.logprob).model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


def _completion_logprobs(
    generation: Generation, tokens: Sequence[SampledToken], tokenizer: Tokenizer, *, offset: int
) -> CompletionLogprobs | None:
    if generation.request.sampling.num_logprobs is None:
        return None
    texts = [tokenizer.decode([token.token_id], skip_special=False) for token in tokens]
    offsets = [offset + sum(len(text) for text in texts[:index]) for index in range(len(texts))]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[_finite(token.logprob) for token in tokens],
        top_logprobs=[
            {
                tokenizer.decode([token_id], skip_special=False): _finite(logprob)
                for token_id, logprob in token.top_logprobs
            }
            for token in tokens
        ],
        text_offset=offsets,
    )
