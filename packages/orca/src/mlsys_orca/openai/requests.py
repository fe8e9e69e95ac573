"""Request bodies of the OpenAI protocol, checked at the edge.

Every field either works or is refused by name: unknown fields are an error, and fields of the protocol that this server
does not implement are accepted only at the value that asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mlsys_orca.batch import MAX_LOGPROBS

Probability = Annotated[float, Field(gt=0, le=1)]
Temperature = Annotated[float, Field(ge=0, le=2)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]

# Fields of the protocol that are not implemented, each with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "parallel_tool_calls": (None, True, False),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
}


class _Body(BaseModel):
    """What the two generation endpoints share."""

    model_config = ConfigDict(extra="forbid", strict=False)

    model: str = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(default=None, ge=1, description="New tokens at most.")
    temperature: Temperature = Field(default=1.0, description="0 is greedy.")
    top_p: Probability = 1.0
    top_k: int | None = Field(default=None, ge=1, description="An extension: sample among this many tokens.")
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=256, description="Written to the log of the request.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_implemented(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        rest = dict(values)
        for name, neutral in _NEUTRAL.items():
            if name in rest and name not in cls.model_fields:
                value = rest.pop(name)
                if not any(type(value) is type(allowed) and value == allowed for allowed in neutral) and not (
                    isinstance(value, int | float) and not isinstance(value, bool) and value in neutral
                ):
                    raise ValueError(f"{name!r} is not implemented by this server; leave it out")
        return rest

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> _Body:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is only allowed when 'stream' is true")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever form they came in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None  # not implemented: only its absence is accepted


class TextPart(BaseModel):
    """A part of a message's content; only text is implemented."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: None = None  # not implemented: only its absence is accepted

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it; a developer message is a system message to models."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(_Body):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs' to be true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give 'max_completion_tokens' or 'max_tokens', not both")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities to report per token; None for none."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Body):
    """``POST /v1/completions``; one prompt, as text or token ids."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: int | None = Field(default=None, ge=0, le=5)


_Body.model_rebuild()
ChatCompletionRequest.model_rebuild()
CompletionRequest.model_rebuild()
