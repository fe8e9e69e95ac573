"""Request fields of ``POST /v1/chat/completions``, and the prompt that a request becomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from mlsys_core.errors import InvalidInputError
from mlsys_core.serving.http import HttpError, Router, cancel_on_disconnect
from pydantic import Field, model_validator

from mlsys_orca.api.answers import STREAMED, collect, num_values, streamed
from mlsys_orca.api.chat_answer import ChatCompletion, chat_completion, chat_events
from mlsys_orca.api.fields import (
    MAX_CHOICES,
    MAX_MESSAGES,
    Body,
    Generating,
    Neutral,
    ResponseFormat,
    grammar_from,
)
from mlsys_orca.api.front import body_size
from mlsys_orca.api.intake import bounded_json
from mlsys_orca.api.service import GenerationParameters, ModelService, text_options
from mlsys_orca.api.tools import Notation, call_grammar, need_notation
from mlsys_orca.scheduling.batch import MAX_LOGPROBS
from mlsys_orca.text.guides import Grammar


class TextPart(Body):
    """A part of a message's content; only text is implemented."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """The function that a message says was called."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str  # JSON


class MessageToolCall(Body):
    """A call in an assistant's message."""

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
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: str | None = Field(default=None, max_length=256)  # for templates that show it
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(default=None, max_length=256)

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("'content' is missing: only an assistant's message with 'tool_calls' may be without")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("'tool_calls' belongs to an assistant's message")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("'tool_call_id' goes with the role 'tool', and with no other")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it; a developer message is a system message to models."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _called(call.function)} for call in self.tool_calls
            ]
        return message


def _called(function: CalledFunction) -> dict[str, Any]:
    try:
        arguments = bounded_json((function.arguments or "{}").encode())
    except (HttpError, UnicodeError) as error:
        raise InvalidInputError(f"the arguments of a call of {function.name!r} are no JSON: {error}") from error
    return {"name": function.name, "arguments": arguments}


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


class ChatCompletionRequest(Generating):
    """``POST /v1/chat/completions``."""

    neutral: ClassVar[Neutral] = {
        **Generating.neutral,
        "audio": (None,),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "moderation": (None,),
        "prediction": (None,),
        "prompt_cache_options": (None,),
        "reasoning_effort": (None, "none"),
        "verbosity": (None,),
        "web_search_options": (None,),
    }
    harmless: ClassVar[frozenset[str]] = Generating.harmless | {"metadata", "store"}
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: int | None = Field(default=None, ge=1, le=2**31, description="The older name of the next.")
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31, description="New tokens at most.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None  # an answer is its client's to keep
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")

    @model_validator(mode="after")
    def _of_a_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs' to be true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give 'max_completion_tokens' or 'max_tokens', not both")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("'tools' has two functions of one name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"'tool_choice' names {self.tool_choice.function.name!r}, which is none of 'tools'")
        if self.tool_choice == "required" and not names:
            raise ValueError("'tool_choice' is 'required', and there are no 'tools'")
        if self.must_call and (self.response_format or self.structured or self.ignore_eos or self.min_tokens):
            raise ValueError(
                "a 'tool_choice' that asks for a call says what the answer is: leave out 'response_format', "
                "'structured_outputs', 'ignore_eos' and 'min_tokens'"
            )
        if self.may_call and self.structured:
            raise ValueError(
                "'structured_outputs' says all that an answer may be: leave out 'tools', give 'response_format' "
                "instead, or set 'tool_choice' to 'none'"
            )
        if self.are_calls_strict and (self.ignore_eos or self.min_tokens):
            raise ValueError("a function that is 'strict' goes neither with 'ignore_eos' nor with 'min_tokens'")
        if self.response_format is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError("'response_format' ends where its text does: not with 'ignore_eos' or 'min_tokens'")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities to report per token; None for none."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def may_call(self) -> bool:
        """True if the answer may be a call or not."""
        return bool(self.offered) and not self.must_call

    @property
    def are_calls_strict(self) -> bool:
        """True if a call, if one comes, has to fit its schema."""
        return self.may_call and any(tool.function.strict for tool in self.offered)

    @property
    def offered(self) -> list[Tool]:
        """The tools offered to the model."""
        return [] if self.tool_choice == "none" else self.tools or []


def parameters_of(body: ChatCompletionRequest, service: ModelService) -> tuple[GenerationParameters, Notation | None]:
    """Return what ``body`` asks to generate, and the notation of its answer's calls (None: it has none).

    Raises:
        InvalidInputError: the model has no chat template, or none that knows tools, or it refuses the messages; or a
            grammar cannot be read.
    """
    template = service.loaded.chat_template
    speaks_of_tools = body.offered or any(message.role == "tool" or message.tool_calls for message in body.messages)
    notation = need_notation(None if template is None else template.source) if speaks_of_tools else None
    grammar = grammar_from(body.structured, body.response_format)
    if notation is not None:
        grammar = _grammar_with_calls(body, notation) or grammar
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
    prompt = service.encode_chat(
        [message.for_template() for message in body.messages],
        tools=tools or None,
        variables=body.chat_template_kwargs,
    )
    options = text_options(body)
    if notation == "mistral":  # whose mark of a call is a control token
        options = replace(options, skips_special=False)
    parameters = GenerationParameters(
        prefix="chatcmpl",
        model=body.model,
        prompts=[prompt],
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        sampling=service.sampling_of(body, num_logprobs=body.num_logprobs),
        seed=body.seed,
        num_choices=body.n or 1,
        grammar=grammar,
        ignores_eos=body.ignore_eos,
        text=options,
    )
    return parameters, notation if body.offered else None


def _grammar_with_calls(body: ChatCompletionRequest, notation: Notation) -> Grammar | None:
    """Return the grammar that tool calls impose on an answer; None: they impose none.

    The answer must be a call, or may be one beside the requested format or, if calls are strict, beside any text.
    """
    wanted = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    functions = [tool.function.model_dump() for tool in body.offered if wanted in (None, tool.function.name)]
    only_one = wanted is not None or body.parallel_tool_calls is False
    schema = None if body.response_format is None else body.response_format.wanted_schema
    if body.must_call:
        return call_grammar(notation, functions, only_one=only_one)
    if body.may_call and schema is not None:
        return call_grammar(notation, functions, only_one=only_one, otherwise=schema)
    if body.are_calls_strict:
        return call_grammar(notation, functions, only_one=only_one, otherwise="text")
    return None


def add_routes(router: Router, service: ModelService) -> None:
    """Add the route ``/v1/chat/completions``."""
    tokenizer = service.loaded.tokenizer

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of server-sent events."""
        service.check_counts(body.model, num_choices=body.n or 1)
        parameters, notation = await service.front.run(parameters_of, body, service, size=body_size(request))
        generation = await service.start(parameters, user=body.user)
        only_one = body.parallel_tool_calls is False
        if body.stream:
            events = chat_events(
                generation, tokenizer, notation=notation, only_one=only_one, include_usage=body.include_usage
            )
            return streamed(generation, events)
        answers = await cancel_on_disconnect(request, collect(generation))
        return await service.front.answer(
            lambda: chat_completion(generation, answers, tokenizer, notation=notation, only_one=only_one),
            size=num_values(answers),
        )
