"""Turn a checked body into running answers: model name, prompt, limits and sampling.

All requests for the engine are made here. Each endpoint turns its own fields into
:class:`GenerationParameters`. A service owns one :class:`Front`: threads for work beside the event loop.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog
from fastapi import Request, Response
from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import HttpError
from mlsys_serving.http.streaming import LARGE, RequestThreads
from pydantic import BaseModel

from mlsys_orca.api.answers import Choice, Generation, GenerationParameters, Identity, Streams
from mlsys_orca.api.fields import MAX_PROMPTS, Generating
from mlsys_orca.api.text_stream import TextOptions, stream_text
from mlsys_orca.engine.client import EngineClient
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.scheduling.batch import GenerationRequest, SamplingParams
from mlsys_orca.text.guides import GrammarGuide, GuideMaker
from mlsys_orca.text.tokenizer import LEAST_MAX_CHARS

_NUM_SMALL_THREADS = 2


class Front(RequestThreads):
    """Threads for the work of requests: two for small work, so that a chat does not wait for a megabyte."""

    def __init__(self) -> None:
        super().__init__("orca-front", num_small=_NUM_SMALL_THREADS)

    async def answer(self, make: Callable[[], BaseModel], *, size: int = 0) -> Response:
        """Return a JSON response of what ``make`` gives; both made and written in a thread of the front.

        Args:
            make: Builds the answer.
            size: Size of the work; see :meth:`run`.
        """
        return await self.run(lambda: Response(to_json(make()), media_type="application/json"), size=size)


def to_json(answer: BaseModel) -> bytes:
    """Return ``answer`` as JSON, piece by piece, so that no answer keeps the interpreter's lock for long.

    Example:
        >>> class Point(BaseModel):
        ...     x: int
        >>> to_json(Point(x=1))
        b'{"x":1}'
    """
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    return "".join(encoder.iterencode(answer)).encode()


def body_size(request: Request) -> int:
    """Return how many bytes a request's body has; :data:`LARGE` if it did not say so before."""
    return int(request.headers.get("content-length", LARGE))


_CHOICE_STEP = 0x9E3779B97F4A7C15  # between the seeds of a request's choices
_MASK = (1 << 63) - 1
_YIELDS_EVERY = 32  # answers begun between two turns of the event loop
MAX_ANSWERS = 2 * MAX_PROMPTS  # of one request, whatever the engine may hold


@dataclass(slots=True)
class ModelService:
    """One served model: its engine, its tokenizer, and the names that clients use."""

    name: str
    loaded: LoadedModel
    engine: EngineClient
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    guides: GuideMaker = None  # type: ignore[assignment]  # None: a new one over the model's tokenizer
    front: Front = field(init=False, default_factory=Front)  # the threads for the work of requests
    streams: Streams = field(init=False, default_factory=Streams)  # the way of streamed answers to clients

    def __post_init__(self) -> None:
        if self.guides is None:
            self.guides = GuideMaker(self.loaded.tokenizer, self.loaded.config.vocab_size)

    @property
    def max_chars(self) -> int:
        """Characters of the longest text that may fit the context, whatever its tokens are."""
        return max(LEAST_MAX_CHARS, self.engine.max_model_len * self.loaded.tokenizer.max_token_chars)

    def warm_up(self) -> None:
        """Build what the first requests would otherwise wait for: the tables of the tokenizer and of grammars."""
        self.loaded.tokenizer.warm_up()
        self.guides.warm_up()

    def check_counts(self, model: str, *, num_prompts: int = 1, num_choices: int = 1) -> None:
        """See that a request's answers may begin, before any work is done for it.

        Raises:
            HttpError: it names no model here (404).
            InvalidInputError: it asks for more answers than one request may.
            BusyError: too many requests wait (429).
        """
        self.adapter_of(model)
        num_answers = num_prompts * num_choices
        if num_answers > MAX_ANSWERS:
            raise InvalidInputError(
                f"{num_prompts} prompts with {num_choices} choices each ask for {num_answers} answers; at most "
                f"{MAX_ANSWERS} may be in one request"
            )
        self.engine.check_room(num_answers)

    def check_length(self, num_chars: int) -> None:
        """See that a prompt of ``num_chars`` characters may fit the context, before it is tokenised.

        Raises:
            HttpError: it cannot (400).
        """
        if num_chars > self.max_chars:
            raise too_long(
                f"the prompt has {num_chars} characters, and no text of more than {self.max_chars} fits this model's "
                f"context of {self.engine.max_model_len} tokens: shorten it"
            )

    @property
    def names(self) -> list[str]:
        """Names under which text can be generated: the model, then its adapters."""
        return [self.name, *sorted(self.engine.adapters)]

    def adapter_of(self, model: str) -> str | None:
        """Return the key of the adapter that ``model`` names; None: the model itself.

        Raises:
            HttpError: it names nothing here (404).
        """
        if model == self.name:
            return None
        key = self.engine.adapter_key(model)
        if key is not None:
            return key
        raise unknown_model(model, self.names)

    def sampling_of(self, body: Generating, *, num_logprobs: int | None) -> SamplingParams:
        """Return the sampling that ``body`` asks for.

        Raises:
            InvalidInputError: a token id is not in the vocabulary.
        """
        vocab_size = self.loaded.config.vocab_size
        bias = tuple((int(key), value) for key, value in (body.logit_bias or {}).items())
        named = {"logit_bias": [key for key, _ in bias], "stop_token_ids": body.stop_token_ids or []}
        for name, ids in (named | {"allowed_token_ids": body.allowed_token_ids or []}).items():
            if ids and max(ids) >= vocab_size:
                raise InvalidInputError(f"{name}: token id {max(ids)} is not in the vocabulary of {vocab_size} tokens")
        late = self.loaded.tokenizer.eos_ids | frozenset(body.stop_token_ids or ())
        return SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k_or_none,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=bias,
            min_tokens=body.min_tokens,
            late_token_ids=tuple(sorted(late)) if body.min_tokens else (),
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(sorted({*body.allowed_token_ids})),
            bad_sequences=self._spellings(body.bad_words or ()),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
        )

    def _spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, at a text's start and after a space."""
        encode = self.loaded.tokenizer.encode
        found = [tuple(encode(before + word.lstrip())) for word in words for before in ("", " ")]
        return tuple(dict.fromkeys(ids for ids in found if ids))

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        """See that ``token_ids`` are all in the vocabulary.

        Raises:
            InvalidInputError: one is not.
        """
        if max(token_ids, default=0) >= self.loaded.config.vocab_size:
            raise InvalidInputError(
                f"token id {max(token_ids)} is not in the vocabulary of {self.loaded.config.vocab_size} tokens"
            )

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """See that ``token_ids`` fit the context, and are all in the vocabulary.

        Raises:
            HttpError: they are too many (400).
            InvalidInputError: one is not in the vocabulary.
        """
        if len(token_ids) >= self.engine.max_model_len:
            raise too_long(
                f"this model's context is {self.engine.max_model_len} tokens, for prompt and answer; the prompt has "
                f"{len(token_ids)}: shorten it"
            )
        self.check_vocabulary(token_ids)

    async def start(
        self, parameters: GenerationParameters, *, user: str | None = None, identity: Identity | None = None
    ) -> Generation:
        """Accept a request; its answers begin at once.

        Args:
            parameters: What is to be generated.
            user: The client's name for whoever asks, for the log.
            identity: What is drawn otherwise, of an answer that is made again.

        Raises:
            HttpError: it names no model here (404), or its prompt and answer are longer than the context (400).
            InvalidInputError: its grammar is refused.
            BusyError: too many requests wait (429).
        """
        if user:
            structlog.contextvars.bind_contextvars(user=user)  # into the request's log line
        adapter = self.adapter_of(parameters.model)
        if parameters.grammar is not None and parameters.sampling.allowed_token_ids is not None:
            raise InvalidInputError("a grammar says which tokens may come: leave out 'allowed_token_ids'")
        self.check_counts(parameters.model, num_prompts=len(parameters.prompts), num_choices=parameters.num_choices)
        guides: Sequence[GrammarGuide | None] = [None] * len(parameters.prompts) * parameters.num_choices
        if parameters.grammar is not None:
            guides = await self.front.run(
                self.guides.guides, parameters.grammar, len(guides), size=len(parameters.grammar.source) * len(guides)
            )
        identity = identity or Identity.draw()
        answer_id = f"{parameters.prefix}-{identity.key}"
        seed = identity.seed if parameters.seed is None else parameters.seed
        requests = []
        for number, prompt in enumerate(parameters.prompts):
            base = self._request(parameters, prompt, adapter)
            for choice in range(parameters.num_choices):
                index = number * parameters.num_choices + choice
                sampling = replace(
                    parameters.sampling, seed=(seed + choice * _CHOICE_STEP) & _MASK, guide=guides[index]
                )
                request_id = answer_id if len(guides) == 1 else f"{answer_id}-{index}"
                requests.append(replace(base, request_id=request_id, sampling=sampling))
                await _now_and_then(index)
        choices: list[Choice] = []
        try:
            for index, request in enumerate(requests):
                tokens = self.engine.submit(request, known=identity.known.get(index))
                choices.append(Choice(index, tokens, stream_text(tokens, self.loaded.tokenizer, parameters.text)))
                await _now_and_then(index)
        except BaseException:
            for started in choices:
                started.tokens.close()
            raise
        num_prompt_tokens = sum(map(len, parameters.prompts))
        made = tuple(choices)
        return Generation(answer_id, identity, parameters.model, made, num_prompt_tokens, parameters.num_choices)

    def check(self, parameters: GenerationParameters) -> None:
        """See that a request names a model, and that its prompts and answers fit the context; nothing begins.

        Raises:
            HttpError: as :meth:`start`.
        """
        adapter = self.adapter_of(parameters.model)
        for prompt in parameters.prompts:
            self._request(parameters, prompt, adapter)

    def _request(
        self, parameters: GenerationParameters, prompt: Sequence[int], adapter: str | None
    ) -> GenerationRequest:
        """Return one choice's request but for its id and sampling."""
        self.check_vocabulary(prompt)  # a tokenizer may have tokens that the model's table has not
        encoder, num_encoder_tokens, num_prompt = self.loaded.config.encoder, 0, len(prompt)
        if encoder is not None:
            prompt, num_encoder_tokens = [*prompt, *encoder.start_token_ids], num_prompt
        room = self.engine.max_model_len - len(prompt)
        asked = max(1, parameters.max_new_tokens) if parameters.max_new_tokens is not None else 1
        if asked > room:
            raise too_long(
                f"this model's context is {self.engine.max_model_len} tokens; the prompt has {num_prompt} and "
                f"{asked} more were asked for: shorten the prompt or lower max_tokens"
            )
        eos_ids = frozenset() if parameters.ignores_eos else self.loaded.tokenizer.eos_ids
        return GenerationRequest(
            request_id="",
            prompt_token_ids=tuple(prompt),
            max_new_tokens=room if parameters.max_new_tokens is None else asked,
            stop_token_ids=eos_ids | parameters.text.stop_token_ids,
            num_encoder_tokens=num_encoder_tokens,
            adapter=adapter,
        )


def text_options(body: Generating) -> TextOptions:
    """Return the options by which ``body`` wants its tokens to become text."""
    return TextOptions(
        stop_strings=body.stop_strings,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        keeps_stop=body.include_stop_str_in_output,
        skips_special=body.skip_special_tokens,
        min_tokens=body.min_tokens,
    )


async def _now_and_then(index: int) -> None:
    if index % _YIELDS_EVERY == _YIELDS_EVERY - 1:
        await asyncio.sleep(0)  # the others' turn


def num_chars(value: object) -> int:
    """Return how many characters all texts in ``value`` have, made of JSON's types and tuples.

    Example:
        >>> num_chars([{"role": "user", "content": "Hello"}])
        9
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_chars, value.values()))
    return sum(map(num_chars, value)) if isinstance(value, list | tuple) else 0


def too_long(message: str) -> HttpError:
    """Return the error 400: the context is too short for what was asked."""
    return HttpError(message, http_status=400, error_code="context_length_exceeded")


def unknown_model(model: str, names: Sequence[str]) -> HttpError:
    """Return the error 404: nothing here has that name."""
    has = ", ".join(map(repr, names)) or "none for this"
    return HttpError(
        f"the model {model[:256]!r} does not exist here; this server has {has}",
        http_status=404,
        error_code="model_not_found",
        param="model",
    )
