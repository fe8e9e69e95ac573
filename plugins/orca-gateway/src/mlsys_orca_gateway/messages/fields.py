"""Request fields of ``POST /v1/messages``, and the conversation that a request is."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from mlsys_orca.api.conversation import Conversation, ToolUse
from mlsys_orca.api.fields import MAX_MESSAGES, Sampled, StopStrings
from mlsys_orca.text.chat_template import Effort
from mlsys_serving.http.bodies import Body, Neutral
from pydantic import Field, model_validator

# Beginnings of prompts are kept whether a client asks for it or not.
CACHE_HINTS = ({"type": "ephemeral"}, *({"type": "ephemeral", "ttl": ttl} for ttl in (None, "5m", "1h")))
_CALLER: Neutral = {"caller": ({"type": "direct"},), "cache_control": CACHE_HINTS, "toolset_name": ()}


class TextBlock(Body):
    """A text."""

    neutral: ClassVar[Neutral] = {"cache_control": CACHE_HINTS, "citations": ([],)}
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # anything: the reasoning is the client's to show


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    neutral: ClassVar[Neutral] = _CALLER
    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class ToolResultBlock(Body):
    """The result of a call."""

    neutral: ClassVar[Neutral] = {"cache_control": CACHE_HINTS, "toolset_name": ()}
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] = ""
    is_error: bool | None = None  # the text tells the model

    def for_template(self) -> dict[str, Any]:
        """Return the result as chat templates expect it."""
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": _text(self.content)}


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> Turn:
        for block in self.content if isinstance(self.content, list) else ():
            if isinstance(block, ToolResultBlock) and self.role == "assistant":
                raise ValueError(f"a block of type {block.type!r} belongs to a user's message")
            if isinstance(block, ToolUseBlock | ThinkingBlock) and self.role == "user":
                raise ValueError(f"a block of type {block.type!r} belongs to an assistant's message")
        return self

    def for_template(self) -> list[dict[str, Any]]:
        """Return the messages that chat templates expect: results of calls first, each by itself."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = self.content
        results = [block.for_template() for block in blocks if isinstance(block, ToolResultBlock)]
        message: dict[str, Any] = {"role": self.role, "content": _text(blocks)}
        if calls := [block.for_template() for block in blocks if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = calls
        if thoughts := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
            message["reasoning_content"] = thoughts
        return [*results, message] if message["content"] or not results else results


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content if isinstance(block, TextBlock))


class ClientTool(Body):
    """A function that the model may call."""

    neutral: ClassVar[Neutral] = {
        "allowed_callers": (["direct"],),
        "cache_control": CACHE_HINTS,
        "defer_loading": (False,),
        "eager_input_streaming": (True, False),
        "input_examples": ([],),
    }
    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the function as :class:`.conversation.ToolUse` has it."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }


class ToolChoice(Body):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, max_length=128)
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """``thinking``."""

    neutral: ClassVar[Neutral] = {"display": ("summarized", "omitted")}
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, le=2**31)  # a wish; max_tokens is what ends an answer


class OutputFormat(Body):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    """``metadata``."""

    user_id: str | None = Field(default=None, max_length=256)


class MessagesRequest(Sampled):
    """``POST /v1/messages``."""

    neutral: ClassVar[Neutral] = {
        "cache_control": CACHE_HINTS,
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_format": (),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    }
    harmless: ClassVar[frozenset[str]] = frozenset({"service_tier"})
    temperature: float = Field(default=1.0, ge=0, le=1, description="0 is greedy.")
    max_tokens: int = Field(ge=1, le=2**31, description="New tokens at most.")
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    stop_sequences: StopStrings | None = None
    tools: Annotated[list[ClientTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    metadata: Metadata | None = None

    @model_validator(mode="after")
    def _of_a_conversation(self) -> MessagesRequest:
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("'tools' has two functions of one name")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise ValueError(f"'tool_choice' is {choice.type!r}, and there are no 'tools'")
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise ValueError("'name' of 'tool_choice' goes with the type 'tool', and with no other")
        if choice is not None and choice.name is not None and choice.name not in names:
            raise ValueError(f"'tool_choice' names {choice.name!r}, which is none of 'tools'")
        if choice is not None and choice.type in ("any", "tool") and self.format is not None:
            raise ValueError("a 'tool_choice' that asks for a call says what the answer is: leave out the format")
        last = self.messages[-1]
        if last.role == "assistant" and not _text(last.content):
            raise ValueError("the last message is the assistant's and has no text to go on with")
        return self

    @property
    def format(self) -> OutputFormat | None:
        """The format of the answer, if it has one."""
        return None if self.output_config is None else self.output_config.format

    @property
    def effort(self) -> Effort | None:
        """Effort that the model is to spend on reasoning; None: its own."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        if self.output_config is not None and self.output_config.effort is not None:
            return self.output_config.effort
        return "high" if self.thinking is not None and self.thinking.type == "enabled" else None

    @property
    def conversation(self) -> Conversation:
        """The messages and what is asked of the answer."""
        before = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        choice = self.tool_choice or ToolChoice(type="auto")
        is_offered = choice.type != "none"
        return Conversation(
            messages=[*before, *(message for turn in self.messages for message in turn.for_template())],
            tools=ToolUse(
                functions=[tool.for_template() for tool in self.tools or ()] if is_offered else [],
                must_call=choice.type in ("any", "tool"),
                wanted=choice.name,
                only_one=choice.disable_parallel_tool_use is True or choice.name is not None,
            ),
            schema=None if self.format is None else self.format.schema_,
            effort=self.effort,
            continues=self.messages[-1].role == "assistant",
        )


class CountTokensRequest(MessagesRequest):
    """``POST /v1/messages/count_tokens``: a request whose answer is not asked for."""

    max_tokens: int = Field(default=1, ge=1, le=2**31)
