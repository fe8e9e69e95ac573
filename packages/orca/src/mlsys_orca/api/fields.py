"""Request fields that the generation endpoints share: how tokens are chosen, when an answer ends, what it must be.

Every field works or is refused by name. Fields of a protocol that mean nothing here are taken at the values that ask
for nothing; a field that no protocol has is an error. Numbers are numbers and not texts that look like some.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from mlsys_core.errors import InvalidInputError
from mlsys_serving.http.bodies import MAX_TEXTS, Body, Neutral, Text, TokenId
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import from_json

from mlsys_orca.scheduling.batch import MAX_LOGPROBS
from mlsys_orca.text.guides import Grammar, GrammarKind, grammar_of

MAX_CHOICES = 128
MAX_PROMPTS = MAX_TEXTS
MAX_MESSAGES = 4096  # of a conversation; likewise the parts of a message
MAX_BIASES = 4096  # tokens with a bias
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Field(max_length=16, fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Label = Annotated[str, Field(max_length=512)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _not_too_many(biases: Any) -> Any:
    """Return ``biases`` if they are few enough to be checked quickly."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"has {len(biases)} tokens, and at most {MAX_BIASES} may have a bias")
    return biases


class StreamOptions(Body):
    """Options of a streamed answer."""

    neutral: ClassVar[Neutral] = {"include_obfuscation": (False,)}
    include_usage: bool = False


class StructuredOutputs(Body):
    """Constraint on an answer; exactly one of these. The names are vLLM's."""

    json_: dict[str, Any] | bool | None = Field(default=None, alias="json", description="A JSON schema.")
    regex: str | None = Field(default=None, min_length=1, max_length=100_000)
    choice: Annotated[list[Text], Field(fail_fast=True)] | None = Field(default=None, min_length=1, max_length=1000)
    grammar: str | None = Field(default=None, min_length=1, max_length=100_000, description="Lark's or GBNF notation.")

    @model_validator(mode="after")
    def _only_one(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("'structured_outputs' takes exactly one of 'json', 'regex', 'choice' and 'grammar'")
        return self

    def to_grammar(self) -> Grammar:
        """Return the grammar.

        Raises:
            InvalidInputError: it cannot be read.
        """
        if self.json_ is not None:
            return grammar_of("json_schema", self.json_)
        if self.regex is not None:
            return grammar_of("regex", self.regex)
        if self.choice is not None:
            return grammar_of("regex", "|".join(_escaped(text) for text in self.choice))
        assert self.grammar is not None
        kind: GrammarKind = "gbnf" if "::=" in self.grammar else "lark"
        return grammar_of(kind, self.grammar)


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in r".^$*+?{}[]\|()/&~<>-#" else char for char in text)


class JsonSchemaFormat(Body):
    """The schema of ``response_format``."""

    name: str = Field(max_length=64)
    description: str | None = None  # for the reader; the schema is what counts
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None  # always: an answer that does not fit cannot come out


class TextContent(Body):
    """Base of a part of a message's content. One of another type, such as an image, is refused by that type alone."""

    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        types = get_args(cls.model_fields["type"].annotation)
        if isinstance(part, dict) and isinstance(given := part.get("type"), str) and given not in types:
            raise ValueError(f"'type' {given[:40]!r} is not read by this server, which takes text ({', '.join(types)})")
        return part


class ResponseFormat(Body):
    """``response_format`` of a chat."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' goes with the type 'json_schema', and with no other")
        return self

    @property
    def wanted_schema(self) -> dict[str, Any] | bool | None:
        """The JSON schema of the answer, True for any object; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return None if self.type == "text" else True

    def to_grammar(self) -> Grammar | None:
        """Return the grammar; None: any text."""
        return None if self.wanted_schema is None else grammar_of("json_schema", self.wanted_schema)


class Sampled(Body):
    """Sampling fields that every endpoint that generates takes."""

    model: str = Field(min_length=1, max_length=256)
    temperature: float = Field(default=1.0, ge=0, le=2, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="Sample among this many tokens; 0 and -1: among all.")
    stream: bool = False

    @property
    def top_k_or_none(self) -> int | None:
        """``top_k`` with one way to say that there is none."""
        return self.top_k if self.top_k is not None and self.top_k > 0 else None


class Labelled(Sampled):
    """Fields that OpenAI's endpoints share: most say something about a request, and nothing about its answer."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        {"service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    )
    metadata: Annotated[dict[str, Label], Field(max_length=16)] | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None  # kept prefixes are found by their tokens
    prompt_cache_retention: Label | None = None
    safety_identifier: Label | None = None
    user: str | None = Field(default=None, max_length=256, description="Written to the log of the request.")


class Generating(Labelled):
    """Fields that ``/v1/completions`` and ``/v1/chat/completions`` share."""

    neutral: ClassVar[Neutral] = {  # vLLM's, at its defaults
        "cache_salt": (),
        "ec_transfer_params": ({},),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "logprob_token_ids": (),
        "priority": (0,),
        "prompt_embeds": (),
        "repetition_detection": (),
        "request_id": (),
        "return_mm_kwargs": (True,),
        "return_token_ids": (False,),
        "return_token_offsets": (False,),
        "return_tokens_as_token_ids": (False,),
        "routed_experts_prompt_start": (0,),
        "session_id": (),
        "spaces_between_special_tokens": (True,),
        "stream_interval": (1,),
        "thinking_token_budget": (-1,),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }
    max_tokens: int | None = Field(default=None, ge=0, le=2**31, description="New tokens at most.")
    min_tokens: int = Field(default=0, ge=0, le=2**31, description="Before so many tokens nothing ends the answer.")
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_not_too_many)] | None = Field(
        default=None, description="Token id, as text -> what is added."
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=16384, fail_fast=True)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=256, fail_fast=True)] | None = Field(
        default=None, description="Texts that the answer must not have."
    )
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = Field(default=None, description="The older names of the above.")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Generating:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' is only allowed when 'stream' is true")
        if self.structured is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError("'structured_outputs' ends where its text does: not with 'ignore_eos' or 'min_tokens'")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("'prompt_logprobs' comes with whole answers only: leave out 'stream'")
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise ValueError(f"'logit_bias' maps token ids, written as texts, to numbers; {key[:40]!r} is no id")
        return self

    @property
    def structured(self) -> StructuredOutputs | None:
        """``structured_outputs``, under whichever of its names it came."""
        kinds = ("json", "regex", "choice", "grammar")
        given = {kind: value for kind in kinds if (value := getattr(self, f"guided_{kind}")) is not None}
        if given and self.structured_outputs is not None:
            raise ValueError(
                f"'guided_{next(iter(given))}' is the older form of 'structured_outputs': give one of both"
            )
        if isinstance(given.get("json"), str):
            try:
                given["json"] = from_json(given["json"], allow_inf_nan=False)
            except ValueError as error:
                raise ValueError(f"'guided_json' is no JSON: {error}") from error
        return StructuredOutputs.model_validate(given) if given else self.structured_outputs

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever form they came in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


def grammar_from(structured: StructuredOutputs | None, response_format: ResponseFormat | None) -> Grammar | None:
    """Return the one grammar that a request names, if any.

    Raises:
        InvalidInputError: it names two, or one that cannot be read.
    """
    named = None if response_format is None else response_format.to_grammar()
    if structured is None:
        return named
    if named is not None:
        raise InvalidInputError("give 'structured_outputs' or 'response_format', not both")
    return structured.to_grammar()
