"""A chat's answer, whole and as the events of a stream: text, tool calls, log-probabilities, usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from mlsys_orca.api.answers import (
    DONE,
    Choice,
    Generation,
    Spent,
    Usage,
    Whole,
    event,
    merged,
)
from mlsys_orca.api.conversation import AnswerForm, AnswerReader, read_whole
from mlsys_orca.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from mlsys_orca.api.text_stream import FinishReason, Part, call_id, calls_of, text_of
from mlsys_orca.scheduling.batch import SampledToken
from mlsys_orca.text.tokenizer import Tokenizer

ChatFinishReason = Literal["stop", "length", "tool_calls"]


class AnswerFunction(BaseModel):
    """The function to be called."""

    name: str
    arguments: str  # JSON


class AnswerToolCall(BaseModel):
    """A call that the model asks for."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class ChatMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
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


class _Addition(BaseModel):
    """A part of a chunk, without the fields that add nothing: a null would replace what clients have."""

    @model_serializer(mode="wrap")
    def _without_nulls(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None}


class FunctionDelta(_Addition):
    """Addition to the function of a call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(_Addition):
    """Addition to a call; its first one has the id, the type and the name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(_Addition):
    """Addition of a chunk to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


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
    generation: Generation, answers: list[Whole], tokenizer: Tokenizer, form: AnswerForm
) -> ChatCompletion:
    """Return the whole answer.

    Args:
        generation: The request and its answers.
        answers: Its complete answers, one for each choice.
        tokenizer: The model's.
        form: What the answers may have beside text.
    """
    scored = answers[0].scored
    return ChatCompletion(
        id=generation.answer_id,
        created=generation.created,
        model=generation.model,
        choices=[_choice(generation, whole, tokenizer, form) for whole in answers],
        usage=Spent.of(generation, answers).usage,
        prompt_logprobs=prompt_logprobs(scored, tokenizer) if scored else None,
    )


def _choice(generation: Generation, whole: Whole, tokenizer: Tokenizer, form: AnswerForm) -> ChatChoice:
    choice = generation.choices[whole.index]
    parts, has_called = read_whole(whole.text, form, whole.finish_reason)
    text, calls = text_of(parts, "text"), calls_of(parts)
    reasoning = text_of(parts, "reasoning")
    return ChatChoice(
        index=whole.index,
        message=ChatMessage(
            content=text if text or not (calls or reasoning) else None,
            reasoning_content=reasoning or None,
            tool_calls=[
                AnswerToolCall(
                    index=index,
                    id=call_id("call", generation.answer_id, index, choice=whole.index),
                    function=AnswerFunction(name=call.name or "", arguments=call.text),
                )
                for index, call in enumerate(calls)
            ]
            or None,
        ),
        logprobs=None if choice.request.sampling.num_logprobs is None else chat_logprobs(whole.tokens, tokenizer),
        finish_reason="tool_calls" if has_called else whole.finish_reason,
        stop_reason=whole.stopped_by,
    )


class _Speaker:
    """One choice's stream: its parts, and the tokens whose text has not been sent."""

    def __init__(self, answer_id: str, choice: Choice, tokenizer: Tokenizer, form: AnswerForm) -> None:
        self._answer_id, self._index = answer_id, choice.index
        self._tokenizer = tokenizer
        self._reader = AnswerReader(form)
        self._has_logprobs = choice.request.sampling.num_logprobs is not None
        self._pending: list[SampledToken] = []
        self._num_calls = 0

    def say(self, text: str, token: SampledToken | None, finish_reason: FinishReason | None) -> list[ChatChunkChoice]:
        """Return the chunks that a piece makes."""
        if token is not None:
            self._pending.append(token)
        parts = self._reader.push(text)
        if finish_reason is not None:
            parts += self._reader.finish(finish_reason)
        chunks = [self._chunk(self._delta(part)) for part in parts]
        if finish_reason is not None and self._pending and self._has_logprobs:
            chunks.append(self._chunk(ChatDelta(content="")))
        return chunks

    def end(self, finish_reason: FinishReason, stopped_by: str | int | None) -> ChatChunkChoice:
        """Return the last chunk."""
        reason: ChatFinishReason = "tool_calls" if self._reader.has_called else finish_reason
        return ChatChunkChoice(index=self._index, delta=ChatDelta(), finish_reason=reason, stop_reason=stopped_by)

    def _delta(self, part: Part) -> ChatDelta:
        if part.kind == "text":
            return ChatDelta(content=part.text)
        if part.kind == "reasoning":
            return ChatDelta(reasoning_content=part.text)
        if part.name is None:
            function = FunctionDelta(arguments=part.text)
            return ChatDelta(tool_calls=[ToolCallDelta(index=self._num_calls - 1, function=function)])
        number, self._num_calls = self._num_calls, self._num_calls + 1
        function = FunctionDelta(name=part.name, arguments=part.text)
        made_id = call_id("call", self._answer_id, number, choice=self._index)
        begun = ToolCallDelta(index=number, id=made_id, type="function", function=function)
        return ChatDelta(tool_calls=[begun])

    def _chunk(self, delta: ChatDelta) -> ChatChunkChoice:
        tokens, self._pending = self._pending, []
        logprobs = chat_logprobs(tokens, self._tokenizer) if self._has_logprobs else None
        return ChatChunkChoice(index=self._index, delta=delta, logprobs=logprobs)


async def chat_events(
    generation: Generation, tokenizer: Tokenizer, form: AnswerForm, *, include_usage: bool = False
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

    speakers = [_Speaker(generation.answer_id, choice, tokenizer, form) for choice in generation.choices]
    for choice in generation.choices:
        yield chunk([ChatChunkChoice(index=choice.index, delta=ChatDelta(role="assistant", content=""))])
    spent = Spent(generation)
    async for choice, delta in merged(generation):
        speaker = speakers[choice.index]
        if delta.token is not None:
            spent.add(choice.index, delta.token)
        for piece in speaker.say(delta.text, delta.token, delta.finish_reason):
            yield chunk([piece])
        if delta.finish_reason is not None:
            yield chunk([speaker.end(delta.finish_reason, delta.stopped_by)])
    if include_usage:
        yield chunk([], spent.usage)
    yield DONE
