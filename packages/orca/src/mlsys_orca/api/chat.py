"""``POST /v1/chat/completions``: messages, tools and other fields, and the prompt that a request becomes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import HttpError, Router, cancel_on_disconnect
from mlsys_serving.http.bodies import Body, Neutral
from pydantic import Field, model_validator

from mlsys_orca.api.answers import STREAMED, GenerationParameters, collect, identity_of, num_values
from mlsys_orca.api.chat_answer import ChatCompletion, chat_completion, chat_events
from mlsys_orca.api.conversation import AnswerForm, Conversation, ToolUse, prepare
from mlsys_orca.api.fields import MAX_CHOICES, MAX_MESSAGES, Generating, ResponseFormat, TextContent
from mlsys_orca.api.intake import bounded_json
from mlsys_orca.api.service import ModelService, body_size, text_options
from mlsys_orca.scheduling.batch import MAX_LOGPROBS
from mlsys_orca.text.chat_template import Effort


class TextPart(TextContent):
    """A text of a message's content."""

    type: Literal["text"]


Content = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


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
        "refusal": (),
        "reasoning": (),
        "audio": (),
        "annotations": ([],),
        "function_call": (),
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
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it; a developer message is a system message to models."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
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


class ChatCompletionRequest(Generating):
    """``POST /v1/chat/completions``."""

    neutral: ClassVar[Neutral] = {
        **Generating.neutral,
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True,),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "return_prompt_text": (False,),
        "verbosity": (),
        "web_search_options": (),
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
    reasoning_effort: Effort | None = None
    continue_final_message: bool = Field(default=False, description="The answer goes on with the last message.")
    add_generation_prompt: bool | None = Field(default=None, description="Begin the assistant's turn; by default so.")
    store: bool | None = None  # an answer is its client's to keep
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables of the chat template.")

    @model_validator(mode="after")
    def _of_a_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
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
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("give 'continue_final_message' or 'add_generation_prompt', not both")
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


def parameters_of(body: ChatCompletionRequest, service: ModelService) -> tuple[GenerationParameters, AnswerForm]:
    """Return what ``body`` asks to generate, and the form of its answer.

    Raises:
        InvalidInputError: as :func:`.conversation.prepare`.
    """
    asked = GenerationParameters(
        prefix="chatcmpl",
        model=body.model,
        max_new_tokens=body.max_completion_tokens or body.max_tokens,
        sampling=service.sampling_of(body, num_logprobs=body.num_logprobs),
        seed=body.seed,
        num_choices=body.n or 1,
        ignores_eos=body.ignore_eos,
        text=text_options(body),
    )
    return prepare(_conversation(body), asked, service)


def _conversation(body: ChatCompletionRequest) -> Conversation:
    wanted = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None
    return Conversation(
        messages=[message.for_template() for message in body.messages],
        tools=ToolUse(
            functions=[tool.function.model_dump() for tool in body.offered],
            must_call=body.must_call,
            wanted=wanted,
            only_one=wanted is not None or body.parallel_tool_calls is False,
        ),
        schema=None if body.response_format is None else body.response_format.wanted_schema,
        grammar=None if body.structured is None else body.structured.to_grammar(),
        effort=body.reasoning_effort,
        variables=body.chat_template_kwargs,
        begins_turn=body.add_generation_prompt is not False,
        continues=body.continue_final_message,
    )


def add_routes(router: Router, service: ModelService) -> None:
    """Add the route ``/v1/chat/completions``."""
    tokenizer = service.loaded.tokenizer

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of server-sent events."""
        service.check_counts(body.model, num_choices=body.n or 1)
        parameters, form = await service.front.run(parameters_of, body, service, size=body_size(request))
        generation = await service.start(parameters, user=body.user, identity=identity_of(request))
        if body.stream:
            events = chat_events(generation, tokenizer, form, include_usage=body.include_usage)
            return await service.streams.streamed(request, generation, events)
        answers = await cancel_on_disconnect(request, collect(generation))
        return await service.front.answer(
            lambda: chat_completion(generation, answers, tokenizer, form),
            size=num_values(answers),
        )
