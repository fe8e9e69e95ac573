"""One request's answers, from the service's pieces to the callers' data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Literal

from mlsys_orca.api.answers import Choice as RunningChoice
from mlsys_orca.api.answers import GenerationParameters
from mlsys_orca.api.conversation import AnswerForm, AnswerReader
from mlsys_orca.api.service import ModelService
from mlsys_orca.api.text_stream import Part, calls_of, joined, text_of
from mlsys_orca.llm.answers import Answer, Choice, FinishReason, Piece, ToolCall
from mlsys_orca.scheduling.batch import SampledToken


async def answer(service: ModelService, parameters: GenerationParameters, form: AnswerForm) -> Answer:
    """Run one prompt's choices to their end."""
    begun_s = time.perf_counter()
    generation = await service.start(parameters)
    try:
        found = await asyncio.gather(*(_choice(each, form, begun_s) for each in generation.choices))
    finally:
        generation.close()
    return Answer(
        choices=tuple(choice for choice, _ in found),
        num_prompt_tokens=generation.num_prompt_tokens,
        num_cached_tokens=found[0][1],
    )


async def pieces(
    service: ModelService, parameters: GenerationParameters, form: AnswerForm
) -> AsyncGenerator[Piece, None]:
    """Yield the answer of a prompt with one choice, as it grows."""
    generation, reader = await service.start(parameters), AnswerReader(form)
    try:
        async for delta in generation.choices[0].deltas:
            parts = reader.push(delta.text)
            if delta.finish_reason is None:
                for part in parts:
                    yield Piece(part.text, part.kind, part.name)
                continue
            reason: FinishReason = delta.finish_reason
            parts += reader.finish(delta.finish_reason)
            if reader.has_called:
                reason = "tool_calls"
            for part in parts[:-1]:
                yield Piece(part.text, part.kind, part.name)
            last = parts[-1] if parts else Part("text")
            yield Piece(last.text, last.kind, last.name, reason)
    finally:
        generation.close()


async def _choice(running: RunningChoice, form: AnswerForm, begun_s: float) -> tuple[Choice, int]:
    """Return a choice, and the tokens of its prompt that were there."""
    reader, parts, tokens = AnswerReader(form), list[Part](), list[SampledToken]()
    first_token_s: float | None = None
    ended: Literal["stop", "length"] = "length"
    async for delta in running.deltas:
        parts += reader.push(delta.text)
        if delta.token is not None:
            tokens.append(delta.token)
            first_token_s = first_token_s or time.perf_counter() - begun_s
        ended = delta.finish_reason or ended
    total_s = time.perf_counter() - begun_s
    parts = joined(parts + reader.finish(ended))
    has_logprobs = bool(tokens) and tokens[0].logprob is not None
    choice = Choice(
        text=text_of(parts, "text"),
        token_ids=tuple(token.token_id for token in tokens),
        finish_reason="tool_calls" if reader.has_called else ended,
        logprobs=tuple(token.logprob or 0.0 for token in tokens) if has_logprobs else None,
        top_logprobs=tuple(dict(token.top_logprobs) for token in tokens) if has_logprobs else None,
        reasoning=None if form.marks is None else text_of(parts, "reasoning"),
        tool_calls=tuple(ToolCall(part.name or "", part.text) for part in calls_of(parts)),
        first_token_s=first_token_s,
        total_s=total_s,
    )
    return choice, tokens[0].num_cached_tokens if tokens else 0
