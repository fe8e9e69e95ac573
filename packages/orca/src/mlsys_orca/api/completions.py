"""``POST /v1/completions``: a text, or token ids, continued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import ClassVar, Literal

from fastapi import Request, Response
from mlsys_serving.http import Router, cancel_on_disconnect
from mlsys_serving.http.bodies import Ids, ManyIds, Neutral, Text, Texts
from pydantic import BaseModel, Field, model_validator

from mlsys_orca.api.answers import (
    DONE,
    STREAMED,
    Generation,
    GenerationParameters,
    Spent,
    Usage,
    Whole,
    collect,
    event,
    identity_of,
    merged,
    num_values,
)
from mlsys_orca.api.fields import MAX_CHOICES, Generating, ResponseFormat, grammar_from
from mlsys_orca.api.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    TextOffsets,
    completion_logprobs,
    prompt_logprobs,
)
from mlsys_orca.api.service import ModelService, body_size, text_options
from mlsys_orca.api.text_stream import FinishReason
from mlsys_orca.scheduling.batch import SampledToken
from mlsys_orca.text.tokenizer import Tokenizer, prompt_text


class CompletionRequest(Generating):
    """``POST /v1/completions``."""

    neutral: ClassVar[Neutral] = {**Generating.neutral, "add_special_tokens": (True,), "suffix": ("",)}
    harmless: ClassVar[frozenset[str]] = Generating.harmless | {"metadata"}
    prompt: Text | Ids | Texts | ManyIds
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="Answers made, of which n are given.")
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=5)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"'best_of' is {self.best_of}, and 'n' of them are {self.n}: it cannot be the smaller")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ValueError("'best_of' is known when all answers are: leave out 'stream'")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise ValueError("'max_tokens' is 0: ask for at least 1, or for 'echo' of a whole answer")
        if self.echo and self.stream and self.logprobs is not None:
            raise ValueError("'echo' with 'logprobs' comes with whole answers only: leave out 'stream'")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class CompletionChoice(BaseModel):
    """One answer, or a piece of one."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None  # the stop string, or the client's stop token, that ended it
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """Answer of ``POST /v1/completions``, and each event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


def parameters_of(body: CompletionRequest, service: ModelService) -> GenerationParameters:
    """Return what ``body`` asks to generate.

    Raises:
        InvalidInputError: a token id is not in the vocabulary, or a grammar cannot be read.
    """
    tokenizer = service.loaded.tokenizer
    for prompt in body.prompts:  # all lengths first: a wrong one costs no work on the others
        if isinstance(prompt, str):
            service.check_length(len(prompt))
        else:
            service.check_ids(prompt)
    prompts = [  # raw: control tokens are these tokens, as in transformers; the texts of a chat make none
        tokenizer.encode(each, add_bos=True, allow_special=True) if isinstance(each, str) else each
        for each in body.prompts
    ]
    sampling = service.sampling_of(body, num_logprobs=body.logprobs)
    if _ranks(body) and sampling.num_logprobs is None:
        sampling = replace(sampling, num_logprobs=0)
    if body.echo and body.logprobs is not None and sampling.num_prompt_logprobs is None:
        sampling = replace(sampling, num_prompt_logprobs=body.logprobs)
    return GenerationParameters(
        prefix="cmpl",
        model=body.model,
        prompts=prompts,
        max_new_tokens=16 if body.max_tokens is None else body.max_tokens,  # the protocol's default for this endpoint
        sampling=sampling,
        seed=body.seed,
        num_choices=body.best_of or body.n or 1,
        grammar=grammar_from(body.structured, body.response_format),
        ignores_eos=body.ignore_eos,
        text=text_options(body),
    )


def _ranks(body: CompletionRequest) -> bool:
    return body.best_of is not None and body.best_of > (body.n or 1)


def completion(
    generation: Generation, answers: list[Whole], body: CompletionRequest, tokenizer: Tokenizer
) -> Completion:
    """Return the whole answer."""
    spent = Spent.of(generation, answers)
    if body.max_tokens == 0:
        spent.num_new = 0
    if _ranks(body):
        answers = _best(answers, body.best_of or 1, body.n or 1)
    choices = []
    for index, whole in enumerate(answers):
        prompt_ids = generation.choices[whole.index].request.prompt_token_ids
        choices.append(_choice(index, whole, prompt_ids, body, tokenizer))
    return Completion(
        id=generation.answer_id,
        created=generation.created,
        model=generation.model,
        choices=choices,
        usage=spent.usage,
    )


def _best(answers: list[Whole], made: int, given: int) -> list[Whole]:
    """Return the ``given`` answers with the highest mean log-probability, best first, of each prompt's ``made``."""
    groups = [answers[start : start + made] for start in range(0, len(answers), made)]
    return [whole for group in groups for whole in sorted(group, key=lambda whole: -whole.mean_logprob)[:given]]


def _choice(
    index: int, whole: Whole, prompt_ids: tuple[int, ...], body: CompletionRequest, tokenizer: Tokenizer
) -> CompletionChoice:
    text, tokens = (whole.text, whole.tokens) if body.max_tokens != 0 else ("", [])
    skips, prompt = body.skip_special_tokens, ""
    if body.echo:
        is_all = body.max_tokens == 0
        prompt = tokenizer.decode(prompt_ids) if is_all else prompt_text(tokenizer, prompt_ids, skip_special=skips)
    logprobs = None
    if body.logprobs is not None:
        offsets = TextOffsets(tokenizer, prompt_ids=prompt_ids, skip_special=skips, start=len(prompt))
        positions = offsets.of(token.token_id for token in tokens)
        if body.echo:
            tokens = [SampledToken("", prompt_ids[0]), *whole.scored, *tokens]
            positions = TextOffsets(tokenizer).of(prompt_ids) + positions
        logprobs = completion_logprobs(tokens, tokenizer, positions)
    return CompletionChoice(
        index=index,
        text=prompt + text,
        logprobs=logprobs,
        finish_reason=whole.finish_reason if body.max_tokens != 0 else "length",
        stop_reason=whole.stopped_by,
        prompt_logprobs=None if body.prompt_logprobs is None else prompt_logprobs(whole.scored, tokenizer),
    )


async def completion_events(
    generation: Generation, body: CompletionRequest, tokenizer: Tokenizer
) -> AsyncGenerator[bytes, None]:
    """Yield a completion as server-sent events, ``[DONE]`` last."""
    exclude = None if body.include_usage else {"usage"}

    def chunk(choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        whole = Completion(
            id=generation.answer_id, created=generation.created, model=generation.model, choices=choices, usage=usage
        )
        return event(whole, exclude=exclude)

    pending: list[list[SampledToken]] = [[] for _ in generation.choices]
    offsets = [
        TextOffsets(tokenizer, prompt_ids=choice.request.prompt_token_ids, skip_special=body.skip_special_tokens)
        for choice in generation.choices
    ]
    spent = Spent(generation)
    if body.echo:
        for choice in generation.choices:
            prompt_ids, skips = choice.request.prompt_token_ids, body.skip_special_tokens
            text = await asyncio.to_thread(prompt_text, tokenizer, prompt_ids, skip_special=skips)
            yield chunk([CompletionChoice(index=choice.index, text=text, finish_reason=None)])
    async for choice, delta in merged(generation):
        waiting = pending[choice.index]
        if delta.token is not None:
            spent.add(choice.index, delta.token)
            waiting.append(delta.token)
        if not delta.text and delta.finish_reason is None:
            continue
        logprobs = None
        if body.logprobs is not None:
            positions = offsets[choice.index].of(token.token_id for token in waiting)
            logprobs = completion_logprobs(waiting, tokenizer, positions)
        pending[choice.index] = []
        piece = CompletionChoice(
            index=choice.index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stopped_by,
        )
        yield chunk([piece])
    if body.include_usage:
        yield chunk([], spent.usage)
    yield DONE


def add_routes(router: Router, service: ModelService) -> None:
    """Add the route ``/v1/completions``."""
    tokenizer = service.loaded.tokenizer

    @router.post("/v1/completions", response_model=Completion, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, whole or as a stream of server-sent events."""
        num_choices = body.best_of or body.n or 1
        service.check_counts(body.model, num_prompts=len(body.prompts), num_choices=num_choices)
        parameters = await service.front.run(parameters_of, body, service, size=body_size(request))
        generation = await service.start(parameters, user=body.user, identity=identity_of(request))
        if body.stream:
            return await service.streams.streamed(request, generation, completion_events(generation, body, tokenizer))
        answers = await cancel_on_disconnect(request, collect(generation))
        return await service.front.answer(
            lambda: completion(generation, answers, body, tokenizer), size=num_values(answers)
        )
