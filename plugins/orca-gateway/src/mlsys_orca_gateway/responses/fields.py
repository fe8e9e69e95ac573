"""Request fields of ``POST /v1/responses``, and the conversation that a request is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from mlsys_orca.api.chat import shown_call
from mlsys_orca.api.conversation import Conversation, ToolUse
from mlsys_orca.api.fields import MAX_MESSAGES, Labelled, TextContent
from mlsys_orca.text.chat_template import Effort
from mlsys_serving.http.bodies import Body, Neutral, Text
from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

Status = Literal["completed", "incomplete", "in_progress"]
End = Literal["cancelled", "failed"]  # of a whole answer that did not come to its own
_CALLER: Neutral = {"caller": ({"type": "direct"},), "namespace": (), "async": (False,)}


class InputText(TextContent):
    """A part of a message."""

    neutral: ClassVar[Neutral] = {"annotations": ([],), "logprobs": ([],)}
    type: Literal["input_text", "output_text"]


Texts = str | Annotated[list[InputText], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class InputMessage(Body):
    """A message; also as an earlier answer has it in its output."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts
    id: str | None = Field(default=None, max_length=256)  # of an earlier answer's; nothing hangs on it
    status: Status | None = None  # likewise, as in the next classes


class InputCall(Body):
    """A call of an earlier answer."""

    neutral: ClassVar[Neutral] = _CALLER
    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    arguments: str  # JSON
    id: str | None = Field(default=None, max_length=256)
    status: Status | None = None


class InputCallOutput(Body):
    """The result of a call."""

    neutral: ClassVar[Neutral] = {"caller": ({"type": "direct"},), "namespace": ()}
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: Texts
    name: str | None = Field(default=None, max_length=256)
    id: str | None = Field(default=None, max_length=256)
    status: Status | None = None


class ReasoningText(Body):
    """A part of an earlier answer's reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Body):
    """Reasoning of an earlier answer."""

    neutral: ClassVar[Neutral] = {"encrypted_content": ()}
    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list, max_length=MAX_MESSAGES)
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    id: str | None = Field(default=None, max_length=256)
    status: Status | None = None


def _type_of(item: Any) -> Any:
    found = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if found is None else found if isinstance(found, str) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_type_of),
]
INPUT_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


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

    @property
    def wanted_schema(self) -> dict[str, Any] | bool | None:
        """The JSON schema of the answer, True for any object; None: any text."""
        return True if self.type == "json_object" else self.schema_


class TextSettings(Body):
    """``text``."""

    neutral: ClassVar[Neutral] = {"verbosity": ("medium",)}
    format: TextFormat = Field(default_factory=TextFormat)


class FunctionTool(Body):
    """A function that the model may call."""

    neutral: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # true unless it is false, as the protocol has it


class NamedFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64)


class Reasoning(Body):
    """``reasoning``."""

    neutral: ClassVar[Neutral] = {
        "summary": ("auto", "concise", "detailed"),  # all of it is in the answer
        "generate_summary": (),
        "context": (),
        "mode": (),
    }
    effort: Effort | None = None


class ResponsesRequest(Labelled):
    """``POST /v1/responses``."""

    neutral: ClassVar[Neutral] = {
        "access_programs": ([],),
        "background_options": (),
        "context_management": (),
        "conversation": (),
        "image": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31)
    text: TextSettings | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = Field(default=None, max_length=256)
    store: bool | None = None
    background: bool | None = Field(default=None, description="Answer at once; the client comes back for the rest.")

    @model_validator(mode="after")
    def _of_a_conversation(self) -> ResponsesRequest:
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("'tools' has two functions of one name")
        if isinstance(self.tool_choice, NamedFunction) and self.tool_choice.name not in names:
            raise ValueError(f"'tool_choice' names {self.tool_choice.name!r}, which is none of 'tools'")
        if self.tool_choice == "required" and not names:
            raise ValueError("'tool_choice' is 'required', and there are no 'tools'")
        if self.background and self.store is False:
            raise ValueError("'background' needs an answer that is kept: leave out 'store'")
        if self.must_call and self.schema is not None:
            raise ValueError("a 'tool_choice' that asks for a call says what the answer is: leave out 'text.format'")
        return self

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedFunction)

    @property
    def schema(self) -> dict[str, Any] | bool | None:  # type: ignore[override]  # pydantic's own is deprecated
        """The JSON schema of the answer, True for any object; None: any text."""
        return None if self.text is None else self.text.format.wanted_schema

    @property
    def items(self) -> list[InputItem]:
        """The input as items."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def conversation(self, before: Sequence[InputItem]) -> Conversation:
        """Return the messages, ``before`` among them, and what is asked of the answer."""
        wanted = self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else None
        offered = [] if self.tool_choice == "none" else self.tools or []
        return Conversation(
            messages=messages_of([*before, *self.items], self.instructions),
            tools=ToolUse(
                functions=[
                    {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.parameters,
                        "strict": tool.strict is not False,
                    }
                    for tool in offered
                ],
                must_call=self.must_call,
                wanted=wanted,
                only_one=wanted is not None or self.parallel_tool_calls is False,
            ),
            schema=self.schema,
            effort=None if self.reasoning is None else self.reasoning.effort,
        )


def messages_of(items: Sequence[InputItem], instructions: str | None) -> list[dict[str, Any]]:
    """Return items as chat templates expect them: what an answer was made of is one message.

    Example:
        >>> call = InputCall(type="function_call", call_id="1", name="f", arguments="{}")
        >>> [sorted(message) for message in messages_of([call, call], "Be brief.")]
        [['content', 'role'], ['content', 'role', 'tool_calls']]
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    is_answer = False  # the last message is the assistant's and goes on

    def answer() -> dict[str, Any]:
        if not is_answer:
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in items:
        if isinstance(item, InputCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, InputCall):
            answer().setdefault("tool_calls", []).append(shown_call(item.call_id, item.name, item.arguments))
        elif isinstance(item, InputReasoning):
            message = answer()
            thought = "".join(part.text for part in item.content or item.summary)
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif item.role == "assistant":
            answer()["content"] += _text(item.content)
        else:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": _text(item.content)})
        is_answer = messages[-1]["role"] == "assistant"
    return messages


def _text(content: str | Sequence[InputText]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content)
