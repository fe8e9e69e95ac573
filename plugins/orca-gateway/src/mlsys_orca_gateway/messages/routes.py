"""``POST /v1/messages``: Anthropic's protocol, for text and calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Literal

from fastapi import Request, Response
from mlsys_orca.api.answers import (
    STREAMED,
    Generation,
    GenerationParameters,
    Whole,
    collect,
    identity_of,
    merged,
    named_event,
)
from mlsys_orca.api.conversation import AnswerForm, AnswerReader, prepare, read_whole
from mlsys_orca.api.service import ModelService, body_size
from mlsys_orca.api.text_stream import Part, TextOptions, call_id
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_serving.http import Router, cancel_on_disconnect
from mlsys_serving.http.errors import ErrorFormat, ErrorInfo, stream_event
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from mlsys_orca_gateway.messages.fields import CountTokensRequest, MessagesRequest
from mlsys_orca_gateway.streams.keeper import AnswerKeeper

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnswerText(BaseModel):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str


class AnswerThinking(BaseModel):
    """Reasoning of an answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class AnswerToolUse(BaseModel):
    """A call that the model asks for."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


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


class TokenCount(BaseModel):
    """Answer of ``POST /v1/messages/count_tokens``."""

    input_tokens: int


class MessageEvent(BaseModel):
    """An event of a stream; further fields by its type."""

    model_config = ConfigDict(extra="allow")

    type: str


def parameters_of(body: MessagesRequest, service: ModelService) -> tuple[GenerationParameters, AnswerForm]:
    """Return what ``body`` asks to generate, and the form of its answer.

    Raises:
        InvalidInputError: as :func:`.conversation.prepare`.
    """
    asked = GenerationParameters(
        prefix="msg",
        model=body.model,
        max_new_tokens=body.max_tokens,
        sampling=SamplingParams(temperature=body.temperature, top_k=body.top_k_or_none, top_p=body.top_p),
        text=TextOptions(stop_strings=tuple(body.stop_sequences or ())),
    )
    return prepare(body.conversation, asked, service)


def _answer(generation: Generation, whole: Whole | None, form: AnswerForm) -> MessagesAnswer:
    """Return the answer; before its end (``whole`` is None) without content."""
    parts, has_called = ([], False) if whole is None else read_whole(whole.text, form, whole.finish_reason)
    blocks = [_block(part, generation.answer_id, number) for number, part in enumerate(parts)]
    return MessagesAnswer(
        id=generation.answer_id,
        model=generation.model,
        content=blocks if blocks or whole is None else [AnswerText(text="")],
        stop_reason=None if whole is None else _stop_reason(whole, has_called=has_called),
        stop_sequence=None if whole is None else _stop_sequence(whole),
        usage=_usage(generation, whole),
    )


def _usage(generation: Generation, whole: Whole | None) -> MessagesUsage:
    num_new = 0 if whole is None else len(whole.tokens)
    return MessagesUsage(input_tokens=generation.num_prompt_tokens, output_tokens=num_new)


def _block(part: Part, answer_id: str, number: int) -> AnswerBlock:
    if part.kind == "text":
        return AnswerText(text=part.text)
    if part.kind == "reasoning":
        return AnswerThinking(thinking=part.text)
    try:
        value = from_json(part.text or "{}", allow_partial=True)  # a call may be cut
    except ValueError:
        value = {}
    made_id = call_id("toolu", answer_id, number)
    return AnswerToolUse(id=made_id, name=part.name or "", input=value if isinstance(value, dict) else {})


def _stop_reason(whole: Whole, *, has_called: bool) -> StopReason:
    if has_called:
        return "tool_use"
    if whole.stopped_by is not None:
        return "stop_sequence"
    return "max_tokens" if whole.finish_reason == "length" else "end_turn"


def _stop_sequence(whole: Whole) -> str | None:
    return None if whole.stopped_by is None else str(whole.stopped_by)


class _Blocks:
    """Events of an answer's blocks, one after the other."""

    def __init__(self, answer_id: str) -> None:
        self._answer_id = answer_id
        self._num_begun = 0
        self._last: Part | None = None

    def events(self, part: Part) -> Iterator[bytes]:
        """Yield what ``part`` adds, and what ends the block before it."""
        if self._last is None or not part.follows(self._last):
            yield from self.end()
            begun = _block(Part(part.kind, name=part.name), self._answer_id, self._num_begun)
            yield _event("content_block_start", index=self._num_begun, content_block=begun)
            self._num_begun += 1
        self._last = part
        if part.text:
            delta = {
                "text": {"type": "text_delta", "text": part.text},
                "reasoning": {"type": "thinking_delta", "thinking": part.text},
                "call": {"type": "input_json_delta", "partial_json": part.text},
            }[part.kind]
            yield _event("content_block_delta", index=self._num_begun - 1, delta=delta)

    @property
    def has_some(self) -> bool:
        """True if a block has begun."""
        return self._last is not None

    def end(self) -> Iterator[bytes]:
        """Yield the end of the last block, if there is one."""
        if self._last is not None:
            yield _event("content_block_stop", index=self._num_begun - 1)


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, MessageEvent(type=name, **fields))


async def message_events(generation: Generation, form: AnswerForm) -> AsyncGenerator[bytes, None]:
    """Yield the answer as named server-sent events."""
    yield _event("message_start", message=_answer(generation, None, form))
    whole, reader, blocks = Whole(0), AnswerReader(form), _Blocks(generation.answer_id)
    async for _, delta in merged(generation):
        if delta.token is not None:
            whole.tokens.append(delta.token)
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            whole.finish_reason, whole.stopped_by = delta.finish_reason, delta.stopped_by
            parts += reader.finish(delta.finish_reason)
            parts = parts if parts or blocks.has_some else [Part("text")]
        for part in parts:
            for event in blocks.events(part):
                yield event
    for event in blocks.end():
        yield event
    stop = {"stop_reason": _stop_reason(whole, has_called=reader.has_called), "stop_sequence": _stop_sequence(whole)}
    yield _event("message_delta", delta=stop, usage=_usage(generation, whole))
    yield _event("message_stop")


def add_routes(router: Router, service: ModelService, keeper: AnswerKeeper) -> None:
    """Add the routes ``/v1/messages`` and ``/v1/messages/count_tokens``."""

    @router.post(MESSAGES_PATH, response_model=MessagesAnswer, responses=STREAMED | MESSAGES_ERRORS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of named events."""
        user = None if body.metadata is None else body.metadata.user_id
        service.check_counts(body.model)
        parameters, form = await service.front.run(parameters_of, body, service, size=body_size(request))
        generation = await service.start(parameters, user=user, identity=identity_of(request))
        if body.stream:
            return await keeper.streamed(request, generation, message_events(generation, form))
        (whole,) = await cancel_on_disconnect(request, collect(generation))
        return await service.front.answer(lambda: _answer(generation, whole, form))

    @router.post(f"{MESSAGES_PATH}/count_tokens", response_model=TokenCount, responses=MESSAGES_ERRORS)
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        """Return the number of tokens that a conversation becomes."""
        service.check_counts(body.model)
        parameters, _ = await service.front.run(parameters_of, body, service, size=body_size(request))
        return TokenCount(input_tokens=len(parameters.prompts[0]))


MESSAGES_PATH = "/v1/messages"
# Anthropic's classes of errors by HTTP status; every other status is one of the two of `_error_type`.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesErrorDetail(BaseModel):
    """Class and text of an error."""

    type: str
    message: str


class MessagesError(BaseModel):
    """The body of an error of ``/v1/messages``."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None


def error_body(info: ErrorInfo) -> Mapping[str, object]:
    """Return the body of an error.

    Example:
        >>> error_body(ErrorInfo(status=404, type="t", code="c", message="no such model", path="/v1/messages"))
        {'type': 'error', 'error': {'type': 'not_found_error', 'message': 'no such model'}, 'request_id': None}
    """
    detail = MessagesErrorDetail(type=_error_type(info.status), message=info.message)
    return MessagesError(error=detail, request_id=info.request_id).model_dump()


def error_event(body: Mapping[str, object], content_type: str) -> bytes | None:
    """Return the last event of a broken stream, which has a name here."""
    event = stream_event(body, content_type)
    return b"event: error\n" + event if event is not None and event.startswith(b"data: ") else event


def _error_type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


MESSAGES_FORMAT = ErrorFormat(body=error_body, model=MessagesError, event=error_event)
MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessagesError, "description": "The request cannot be served as it is"},
    "5XX": {"model": MessagesError, "description": "The server could not serve the request"},
}
