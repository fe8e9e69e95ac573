"""Answer of ``POST /v1/responses``: its items, whole and as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from mlsys_orca.api.answers import Generation, Spent, TokenDetails, Whole, named_event
from mlsys_orca.api.text_stream import Part, call_id
from pydantic import BaseModel, ConfigDict, Field

from mlsys_orca_gateway.responses.fields import End, ResponsesRequest, Status


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputReasoningText(BaseModel):
    """The text of a reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(BaseModel):
    """The message of an answer."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputReasoning(BaseModel):
    """The reasoning of an answer."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = Field(default_factory=list)
    content: list[OutputReasoningText]
    status: Status


class OutputCall(BaseModel):
    """A call that the model asks for."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str  # JSON
    status: Status


OutputItem = OutputMessage | OutputReasoning | OutputCall


class OutputTokenDetails(BaseModel):
    """Details of the output tokens counted in :class:`ResponsesUsage`."""

    reasoning_tokens: int = 0


class ResponsesUsage(BaseModel):
    """Number of tokens a request cost."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Reason why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    """Error that ended an answer which its client had left to itself."""

    code: str
    message: str


class ResponsesAnswer(BaseModel):
    """Answer of ``POST /v1/responses``."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    background: bool = False
    status: Status | End
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any] | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None


class StreamEvent(BaseModel):
    """An event of a stream; further fields by its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class Items:
    """An answer's items as they grow, with their events.

    Args:
        answer_id: The answer's.
    """

    def __init__(self, answer_id: str) -> None:
        self._answer_id, self._own = answer_id, answer_id.partition("-")[2]
        self._number = 0  # of the next event
        self._last: Part | None = None
        self._texts: list[str] = []  # of the last item
        self.done: list[OutputItem] = []
        self.reasoning = ""  # all of it

    def event(self, kind: str, /, **fields: Any) -> bytes:
        """Return the next event."""
        made = StreamEvent(type=kind, sequence_number=self._number, **fields)
        self._number += 1
        return named_event(kind, made)

    def add(self, part: Part) -> Iterator[bytes]:
        """Take the next part; yield its events, those of the end of the item before it among them."""
        if self._last is None or not part.follows(self._last):
            yield from self.end("completed")
            self._begin(part)
            yield self.event("response.output_item.added", output_index=len(self.done), item=self._item("in_progress"))
            if part.kind != "call":
                yield self.event("response.content_part.added", **self._place(), part=self._content(""))
        self._texts.append(part.text)
        if part.text:
            yield self.event(f"response.{self._kind}.delta", **self._place(), delta=part.text, **self._logprobs())

    def end(self, status: Status) -> Iterator[bytes]:
        """Yield the end of the last item, if there is one."""
        if self._last is None:
            return
        text, place = "".join(self._texts), self._place()
        item = self._item(status, text)
        if self._last.kind == "call":
            yield self.event("response.function_call_arguments.done", **place, arguments=text, name=self._last.name)
        else:
            yield self.event(f"response.{self._kind}.done", **place, text=text, **self._logprobs())
            yield self.event("response.content_part.done", **place, part=self._content(text))
        if self._last.kind == "reasoning":
            self.reasoning += text
        yield self.event("response.output_item.done", output_index=len(self.done), item=item)
        self.done.append(item)
        self._last = None

    def _begin(self, part: Part) -> None:
        self._last, self._texts = part, []
        self._call_id = call_id("call", self._answer_id, len(self.done))

    @property
    def _kind(self) -> str:
        assert self._last is not None
        kinds = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
        return kinds[self._last.kind]

    def _id(self) -> str:
        assert self._last is not None
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[self._last.kind]
        return f"{prefix}-{self._own}" + (f"-{len(self.done)}" if self.done else "")

    def _place(self) -> dict[str, Any]:
        assert self._last is not None
        place: dict[str, Any] = {"item_id": self._id(), "output_index": len(self.done)}
        return place if self._last.kind == "call" else place | {"content_index": 0}

    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._kind == "output_text" else {}

    def _content(self, text: str) -> OutputText | OutputReasoningText:
        return OutputText(text=text) if self._kind == "output_text" else OutputReasoningText(text=text)

    def _item(self, status: Status, text: str | None = None) -> OutputItem:
        """Return the item with ``text``; None: it has just begun."""
        assert self._last is not None
        if self._last.kind == "call":
            return OutputCall(
                id=self._id(), call_id=self._call_id, name=self._last.name or "", arguments=text or "", status=status
            )
        if self._last.kind == "reasoning":
            thought = [] if text is None else [OutputReasoningText(text=text)]
            return OutputReasoning(id=self._id(), content=thought, status=status)
        return OutputMessage(id=self._id(), status=status, content=[] if text is None else [OutputText(text=text)])


def answer_of(
    generation: Generation, body: ResponsesRequest, whole: Whole | None, output: list[OutputItem], num_reasoning: int
) -> ResponsesAnswer:
    """Return the answer.

    Args:
        generation: The request and its answer.
        body: The request.
        whole: The complete answer; None: it is not yet.
        output: Its items.
        num_reasoning: Tokens of its reasoning.
    """
    is_cut = whole is not None and whole.finish_reason == "length"
    status: Status = "in_progress" if whole is None else "incomplete" if is_cut else "completed"
    given = body.model_dump(
        include={"tools", "tool_choice", "text", "reasoning"}, by_alias=True, exclude_none=True, mode="json"
    )
    return ResponsesAnswer(
        id=generation.answer_id,
        created_at=generation.created,
        background=bool(body.background),
        status=status,
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=generation.model,
        output=output,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=given.get("reasoning"),
        store=body.store is not False,
        temperature=body.temperature,
        text=given.get("text", {"format": {"type": "text"}}),
        tool_choice=given.get("tool_choice", "auto"),
        tools=given.get("tools", []),
        top_p=body.top_p,
        usage=None if whole is None else _usage(Spent.of(generation, [whole]), num_reasoning),
    )


def _usage(spent: Spent, num_reasoning: int) -> ResponsesUsage:
    usage = spent.usage
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=usage.prompt_tokens_details,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokenDetails(reasoning_tokens=min(num_reasoning, usage.completion_tokens)),
        total_tokens=usage.total_tokens,
    )
