"""``POST /v1/responses``: OpenAI's newer endpoint, for text. Nothing is stored, so nothing can be continued by id."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from mlsys_core.serving.http import Router, cancel_on_disconnect
from pydantic import BaseModel, ConfigDict, Field, model_validator

from mlsys_orca.api.answers import STREAMED, Spent, TokenDetails, Usage, Whole, collect, merged, named_event, streamed
from mlsys_orca.api.fields import MAX_MESSAGES, Body, Labelled, Neutral, Text
from mlsys_orca.api.front import body_size
from mlsys_orca.api.service import Generation, GenerationParameters, ModelService
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_orca.text.guides import Grammar, grammar_of


class InputText(Body):
    """A part of a message."""

    neutral: ClassVar[Neutral] = {"annotations": (None, []), "logprobs": (None, [])}
    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Body):
    """A message; also as an earlier answer has it in its output."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    id: str | None = Field(default=None, max_length=256)  # of an earlier answer's; nothing hangs on it
    status: Literal["completed", "incomplete", "in_progress"] | None = None  # likewise

    def for_template(self) -> dict[str, object]:
        """Return the message as chat templates expect it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class TextFormat(Body):
    """Format that the answer must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("'schema' goes with the type 'json_schema', and with no other")
        return self

    def to_grammar(self) -> Grammar | None:
        """Return the grammar; None: any text."""
        if self.schema_ is not None:
            return grammar_of("json_schema", self.schema_)
        return None if self.type == "text" else grammar_of("json_schema", True)


class TextSettings(Body):
    """``text``."""

    neutral: ClassVar[Neutral] = {"verbosity": (None,)}
    format: TextFormat = Field(default_factory=TextFormat)


class ResponsesRequest(Labelled):
    """``POST /v1/responses``."""

    neutral: ClassVar[Neutral] = {
        "access_programs": (None, []),
        "background": (None, False),
        "background_options": (None,),
        "context_management": (None,),
        "conversation": (None,),
        "image": (None,),
        "include": (None, []),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "previous_response_id": (None,),
        "prompt": (None,),
        "prompt_cache_options": (None,),
        "reasoning": (None,),
        "store": (None, False),
        "stream_options": (None, {}, {"include_obfuscation": False}),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
        "parallel_tool_calls": (None, True, False),
    }
    input: Text | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31)
    text: TextSettings | None = None

    @property
    def messages(self) -> list[dict[str, object]]:
        """The conversation."""
        said = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        before: list[dict[str, object]] = (
            [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        )
        return [*before, *(message.for_template() for message in said)]


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(BaseModel):
    """The message of an answer."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Literal["completed", "incomplete", "in_progress"]
    content: list[OutputText]


class OutputTokenDetails(BaseModel):
    """Details of the output tokens counted in :class:`ResponsesUsage`."""

    reasoning_tokens: int = 0


class ResponsesUsage(BaseModel):
    """Number of tokens a request cost."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails = Field(default_factory=OutputTokenDetails)
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Reason why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponsesAnswer(BaseModel):
    """Answer of ``POST /v1/responses``."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "incomplete", "in_progress"]
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = True
    temperature: float
    tool_choice: Literal["auto"] = "auto"
    tools: list[Any] = Field(default_factory=list)
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None


class StreamEvent(BaseModel):
    """An event of a stream; further fields by its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


def parameters_of(body: ResponsesRequest, service: ModelService) -> GenerationParameters:
    """Return what ``body`` asks to generate."""
    return GenerationParameters(
        prefix="resp",
        model=body.model,
        prompts=[service.encode_chat(body.messages)],
        max_new_tokens=body.max_output_tokens,
        sampling=SamplingParams(temperature=body.temperature, top_k=body.top_k_or_none, top_p=body.top_p),
        grammar=None if body.text is None else body.text.format.to_grammar(),
    )


def _answer(generation: Generation, body: ResponsesRequest, whole: Whole | None) -> ResponsesAnswer:
    """Return the answer; before its end (``whole`` is None) without an output."""
    is_cut = whole is not None and whole.finish_reason == "length"
    status: Literal["completed", "incomplete", "in_progress"] = "in_progress"
    if whole is not None:
        status = "incomplete" if is_cut else "completed"
    return ResponsesAnswer(
        id=generation.answer_id,
        created_at=generation.created,
        status=status,
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=generation.model,
        output=[] if whole is None else [_message(generation, status, whole.text)],
        temperature=body.temperature,
        top_p=body.top_p,
        usage=None if whole is None else _usage(Spent.of(generation, [whole]).usage),
    )


def _usage(usage: Usage) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=usage.prompt_tokens_details,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )


def _message(
    generation: Generation, status: Literal["completed", "incomplete", "in_progress"], text: str | None
) -> OutputMessage:
    content = [] if text is None else [OutputText(text=text)]
    return OutputMessage(id=generation.answer_id.replace("resp-", "msg-"), status=status, content=content)


async def response_events(generation: Generation, body: ResponsesRequest) -> AsyncGenerator[bytes, None]:
    """Yield the answer as named server-sent events."""
    number = 0

    def event(name: str, **fields: Any) -> bytes:
        nonlocal number
        made = StreamEvent(type=name, sequence_number=number, **fields)
        number += 1
        return named_event(name, made)

    begun = _answer(generation, body, None)
    item = _message(generation, "in_progress", None)
    location = {"item_id": item.id, "output_index": 0, "content_index": 0}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    yield event("response.output_item.added", output_index=0, item=item)
    yield event("response.content_part.added", **location, part=OutputText(text=""))
    whole, texts = Whole(0), list[str]()
    async for _, delta in merged(generation):
        if delta.token is not None:
            whole.tokens.append(delta.token)
        if delta.text:
            texts.append(delta.text)
            yield event("response.output_text.delta", **location, delta=delta.text, logprobs=[])
        if delta.finish_reason is not None:
            whole.finish_reason = delta.finish_reason
    whole.text = "".join(texts)
    ended = _answer(generation, body, whole)
    yield event("response.output_text.done", **location, text=whole.text, logprobs=[])
    yield event("response.content_part.done", **location, part=OutputText(text=whole.text))
    yield event("response.output_item.done", output_index=0, item=ended.output[0])
    yield event(f"response.{ended.status}", response=ended)


def add_routes(router: Router, service: ModelService) -> None:
    """Add the route ``/v1/responses``."""

    @router.post("/v1/responses", response_model=ResponsesAnswer, responses=STREAMED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a text or a conversation, whole or as a stream of named events."""
        service.check_counts(body.model)
        parameters = await service.front.run(parameters_of, body, service, size=body_size(request))
        generation = await service.start(parameters, user=body.user)
        if body.stream:
            return streamed(generation, response_events(generation, body))
        (whole,) = await cancel_on_disconnect(request, collect(generation))
        return await service.front.answer(lambda: _answer(generation, body, whole))
