"""A chat's answer, whole and as the events of a stream: text, tool calls, log-probabilities, usage."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Literal

from pydantic import BaseModel

from mlsys_orca.api.answers import (
    DONE,
    ChatLogprobs,
    PromptLogprobs,
    Spent,
    Usage,
    Whole,
    chat_logprobs,
    event,
    merged,
    prompt_logprobs,
)
from mlsys_orca.api.service import Choice, Generation
from mlsys_orca.api.tools import Notation, ToolCall, ToolParser
from mlsys_orca.scheduling.batch import SampledToken
from mlsys_orca.text.tokenizer import Tokenizer

ChatFinishReason = Literal["stop", "length", "tool_calls"]


class AnswerFunction(BaseModel):
    """The function to be called."""

    name: str
    arguments: str  # JSON


class AnswerToolCall(BaseModel):
    """A call that the model asks for."""

    index: int | None = None  # in chunks only
    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class ChatMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None  # the stop string, or the client's stop token, that ended it


class ChatCompletion(BaseModel):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(BaseModel):
    """Addition of a chunk to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChunkChoice(BaseModel):
    """One answer's part of a chunk."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


def chat_completion(
    generation: Generation,
    answers: list[Whole],
    tokenizer: Tokenizer,
    *,
    notation: Notation | None = None,
    only_one: bool = False,
) -> ChatCompletion:
    """Return the whole answer.

    Args:
        generation: The request and its answers.
        answers: Its complete answers, one for each choice.
        tokenizer: The model's.
        notation: Notation of calls; None: there are none.
        only_one: Calls after the first are left out.
    """
    scored = answers[0].scored
    return ChatCompletion(
        id=generation.answer_id,
        created=generation.created,
        model=generation.model,
        choices=[_choice(generation.choices[w.index], w, tokenizer, notation, only_one=only_one) for w in answers],
        usage=Spent.of(generation, answers).usage,
        prompt_logprobs=prompt_logprobs(scored, tokenizer) if scored else None,
    )


def _choice(
    choice: Choice, whole: Whole, tokenizer: Tokenizer, notation: Notation | None, *, only_one: bool
) -> ChatChoice:
    text, calls = whole.text, list[ToolCall]()
    if notation is not None:
        parser = ToolParser(notation)
        text, calls = parser.push(whole.text)
        tail, last = parser.finish()
        text, calls = text + tail, (calls + last)[: 1 if only_one else None]
    return ChatChoice(
        index=whole.index,
        message=ChatMessage(
            content=text if text.strip() or not calls else None,
            tool_calls=[_wire(call) for call in calls] or None,
        ),
        logprobs=None if choice.request.sampling.num_logprobs is None else chat_logprobs(whole.tokens, tokenizer),
        finish_reason="tool_calls" if calls else whole.finish_reason,
        stop_reason=whole.stopped_by,
    )


def _wire(call: ToolCall, index: int | None = None) -> AnswerToolCall:
    function = AnswerFunction(name=call.name, arguments=call.arguments)
    return AnswerToolCall(index=index, id=f"call_{uuid.uuid4().hex[:24]}", function=function)


class _Speaker:
    """One choice's stream: its text and calls, and the tokens whose text has not been sent."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer, notation: Notation | None, *, only_one: bool) -> None:
        self._index = choice.index
        self._tokenizer = tokenizer
        self._parser = None if notation is None else ToolParser(notation)
        self._only_one = only_one
        self._has_logprobs = choice.request.sampling.num_logprobs is not None
        self._pending: list[SampledToken] = []
        self._num_calls = 0

    def say(self, text: str, token: SampledToken | None, *, is_last: bool) -> list[ChatChunkChoice]:
        """Return the chunks that a piece makes."""
        if token is not None:
            self._pending.append(token)
        calls: list[ToolCall] = []
        if self._parser is not None:
            text, calls = self._parser.push(text)
            if is_last:
                tail, more = self._parser.finish()
                text, calls = text + tail, calls + more
            if (calls or self._num_calls) and not text.strip():
                text = ""
        chunks = []
        if text or (is_last and self._pending and self._has_logprobs):
            chunks.append(self._chunk(ChatDelta(content=text)))
        for call in calls:
            if self._only_one and self._num_calls:
                break
            chunks.append(self._chunk(ChatDelta(tool_calls=[_wire(call, self._num_calls)])))
            self._num_calls += 1
        return chunks

    def end(self, finish_reason: Literal["stop", "length"], stopped_by: str | int | None) -> ChatChunkChoice:
        """Return the last chunk."""
        reason: ChatFinishReason = "tool_calls" if self._num_calls else finish_reason
        return ChatChunkChoice(index=self._index, delta=ChatDelta(), finish_reason=reason, stop_reason=stopped_by)

    def _chunk(self, delta: ChatDelta) -> ChatChunkChoice:
        tokens, self._pending = self._pending, []
        logprobs = chat_logprobs(tokens, self._tokenizer) if self._has_logprobs else None
        return ChatChunkChoice(index=self._index, delta=delta, logprobs=logprobs)


async def chat_events(
    generation: Generation,
    tokenizer: Tokenizer,
    *,
    notation: Notation | None = None,
    only_one: bool = False,
    include_usage: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Yield a chat answer as server-sent events, ``[DONE]`` last; arguments as :func:`chat_completion`'s.

    With ``include_usage`` every chunk carries the field, null but in the last, as the protocol says.
    """
    exclude = None if include_usage else {"usage"}

    def chunk(choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        whole = ChatCompletionChunk(
            id=generation.answer_id, created=generation.created, model=generation.model, choices=choices, usage=usage
        )
        return event(whole, exclude=exclude)

    speakers = [_Speaker(choice, tokenizer, notation, only_one=only_one) for choice in generation.choices]
    for choice in generation.choices:
        yield chunk([ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content=""))])
    spent = Spent(generation)
    async for choice, delta in merged(generation):
        speaker = speakers[choice.index]
        if delta.token is not None:
            spent.add(choice.index, delta.token)
        for piece in speaker.say(delta.text, delta.token, is_last=delta.finish_reason is not None):
            yield chunk([piece])
        if delta.finish_reason is not None:
            yield chunk([speaker.end(delta.finish_reason, delta.stopped_by)])
    if include_usage:
        yield chunk([], spent.usage)
    yield DONE
