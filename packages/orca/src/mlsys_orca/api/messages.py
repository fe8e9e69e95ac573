"""``POST /v1/messages``: Anthropic's protocol, for text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from mlsys_core.serving.http import Router, cancel_on_disconnect
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mlsys_orca.api.answers import STREAMED, Whole, collect, merged, named_event, streamed
from mlsys_orca.api.errors import MESSAGES_ERRORS, MESSAGES_PATH
from mlsys_orca.api.fields import MAX_MESSAGES, Body, Neutral, Sampled, StopStrings
from mlsys_orca.api.front import body_size
from mlsys_orca.api.service import Generation, GenerationParameters, ModelService
from mlsys_orca.api.text_stream import TextOptions
from mlsys_orca.scheduling.batch import SamplingParams

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class TextBlock(Body):
    """A part of a message."""

    neutral: ClassVar[Neutral] = {"cache_control": (None,), "citations": (None,)}
    type: Literal["text"]
    text: str


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[TextBlock], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Metadata(Body):
    """``metadata``."""

    user_id: str | None = Field(default=None, max_length=256)


class MessagesRequest(Sampled):
    """``POST /v1/messages``."""

    neutral: ClassVar[Neutral] = {
        "cache_control": (None,),
        "container": (None,),
        "context_management": (None,),
        "diagnostics": (None,),
        "inference_geo": (None,),
        "mcp_servers": (None, []),
        "output_config": (None, {}),
        "output_format": (None,),
        "service_tier": (None, "auto", "standard_only"),
        "speed": (None, "standard"),
        "thinking": (None, {"type": "disabled"}),
        "tool_choice": (None, {"type": "none"}),
        "tools": (None, []),
        "user_profile_id": (None,),
        "workspace_id": (None,),
    }
    temperature: float = Field(default=1.0, ge=0, le=1, description="0 is greedy.")
    max_tokens: int = Field(ge=1, le=2**31, description="New tokens at most.")
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    stop_sequences: StopStrings | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> MessagesRequest:
        if self.messages[-1].role != "user":
            raise ValueError("'messages' ends with the assistant's turn: to begin its answer for it is not implemented")
        return self

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them."""
        before = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        return [*before, *({"role": turn.role, "content": _text(turn.content)} for turn in self.messages)]


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


class AnswerBlock(BaseModel):
    """The text of an answer."""

    type: Literal["text"] = "text"
    text: str


class MessagesUsage(BaseModel):
    """Number of tokens a request cost."""

    input_tokens: int
    output_tokens: int


class MessagesAnswer(BaseModel):
    """Answer of ``POST /v1/messages``."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None = None
    usage: MessagesUsage


class MessageEvent(BaseModel):
    """An event of a stream; further fields by its type."""

    model_config = ConfigDict(extra="allow")

    type: str


def parameters_of(body: MessagesRequest, service: ModelService) -> GenerationParameters:
    """Return what ``body`` asks to generate."""
    return GenerationParameters(
        prefix="msg",
        model=body.model,
        prompts=[service.encode_chat(body.conversation)],
        max_new_tokens=body.max_tokens,
        sampling=SamplingParams(temperature=body.temperature, top_k=body.top_k_or_none, top_p=body.top_p),
        text=TextOptions(stop_strings=tuple(body.stop_sequences or ())),
    )


def _stop_reason(whole: Whole) -> StopReason:
    if whole.stopped_by is not None:
        return "stop_sequence"
    return "max_tokens" if whole.finish_reason == "length" else "end_turn"


def _answer(generation: Generation, whole: Whole | None) -> MessagesAnswer:
    return MessagesAnswer(
        id=generation.answer_id,
        model=generation.model,
        content=[] if whole is None else [AnswerBlock(text=whole.text)],
        stop_reason=None if whole is None else _stop_reason(whole),
        stop_sequence=None if whole is None or whole.stopped_by is None else str(whole.stopped_by),
        usage=MessagesUsage(
            input_tokens=generation.num_prompt_tokens, output_tokens=0 if whole is None else len(whole.tokens)
        ),
    )


async def message_events(generation: Generation) -> AsyncGenerator[bytes, None]:
    """Yield the answer as named server-sent events."""

    def event(name: str, **fields: Any) -> bytes:
        return named_event(name, MessageEvent(type=name, **fields))

    yield event("message_start", message=_answer(generation, None))
    yield event("content_block_start", index=0, content_block=AnswerBlock(text=""))
    whole = Whole(0)
    async for _, delta in merged(generation):
        if delta.token is not None:
            whole.tokens.append(delta.token)
        if delta.text:
            yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
        if delta.finish_reason is not None:
            whole.finish_reason, whole.stopped_by = delta.finish_reason, delta.stopped_by
    ended = _answer(generation, whole)
    yield event("content_block_stop", index=0)
    stop = {"stop_reason": ended.stop_reason, "stop_sequence": ended.stop_sequence}
    yield event("message_delta", delta=stop, usage=ended.usage)
    yield event("message_stop")


def add_routes(router: Router, service: ModelService) -> None:
    """Add the route ``/v1/messages``."""

    @router.post(MESSAGES_PATH, response_model=MessagesAnswer, responses=STREAMED | MESSAGES_ERRORS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of named events."""
        user = None if body.metadata is None else body.metadata.user_id
        service.check_counts(body.model)
        parameters = await service.front.run(parameters_of, body, service, size=body_size(request))
        generation = await service.start(parameters, user=user)
        if body.stream:
            return streamed(generation, message_events(generation))
        (whole,) = await cancel_on_disconnect(request, collect(generation))
        return await service.front.answer(lambda: _answer(generation, whole))
