"""Messages and tools of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import HttpError
from mlsys_serving.http.bodies import Body, Neutral
from pydantic import Field, model_validator

from mlsys_orca.api.fields import MAX_CHOICES, MAX_MESSAGES
from mlsys_orca.api.images import Detail, SentImage, content_of
from mlsys_orca.api.intake import bounded_json


class TextPart(Body):
    """A text of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """An image: a data URL, since nothing is fetched."""

    url: str
    detail: Detail | None = None


class ImagePart(Body):
    """An image of a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
Content = Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class CalledFunction(Body):
    """The function that a message says was called."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str  # JSON


class MessageToolCall(Body):
    """A call in an assistant's message."""

    index: int | None = None  # as an answer has it; the order says the same
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a chat."""

    neutral: ClassVar[Neutral] = {
        "refusal": (None,),
        "audio": (None,),
        "annotations": (None, []),
        "function_call": (None,),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Content | None = None
    name: str | None = Field(default=None, max_length=256)  # for templates that show it
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = None  # of an assistant's message, for templates that show it

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("'content' is missing: only an assistant's message with 'tool_calls' may be without")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("'tool_calls' belongs to an assistant's message")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("'tool_call_id' goes with the role 'tool', and with no other")
        if self.role != "user" and any(isinstance(part, ImagePart) for part in self.parts):
            raise ValueError(f"an 'image_url' belongs to a user's message, not to one of the role {self.role!r}")
        return self

    @property
    def parts(self) -> list[ContentPart]:
        """The content, if it is in parts."""
        return self.content if isinstance(self.content, list) else []

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it; a developer message is a system message to models."""
        content = self.content if isinstance(self.content, str) else content_of(map(_handed_on, self.parts))
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                shown_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ]
        return message


def _handed_on(part: ContentPart) -> str | SentImage:
    return part.text if isinstance(part, TextPart) else SentImage(part.image_url.url, part.image_url.detail)


def shown_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as chat templates expect it.

    Raises:
        InvalidInputError: ``arguments`` are no JSON.
    """
    try:
        value = bounded_json((arguments or "{}").encode())
    except (HttpError, UnicodeError) as error:
        raise InvalidInputError(f"the arguments of a call of {name!r} are no JSON: {error}") from error
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}


class Function(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # arguments fit; those of a call that must come fit in any case


class Tool(Body):
    """A tool; only functions are implemented."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function of a :class:`NamedTool`."""

    name: str = Field(min_length=1, max_length=64)


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction
