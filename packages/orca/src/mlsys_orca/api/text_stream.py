"""Turn tokens into text: one request's answer as it grows, whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from mlsys_core.errors import InvalidInputError

from mlsys_orca.api.stop_strings import StopStringFilter
from mlsys_orca.engine.streams import TokenStream
from mlsys_orca.scheduling.batch import SampledToken, ScoredPrompt
from mlsys_orca.scheduling.request import GenerationResult
from mlsys_orca.text.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of an answer."""

    text: str  # may be empty while a character, or what may be a stop string, is incomplete
    token: SampledToken | None  # the token that brought it; None for what is left at the end
    finish_reason: FinishReason | None = None  # of the answer, on its last piece
    stopped_by: str | int | None = None  # with it: the stop string, or the id of a stop token that the client gave
    scored: tuple[SampledToken, ...] = ()  # the prompt's tokens with their log-probabilities, before the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options for turning tokens into text."""

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # the client's own, to be named where one ends the answer
    keeps_stop: bool = False  # the stop string, or the stop token's text, stays in the answer
    skips_special: bool = True  # control tokens have no text
    min_tokens: int = 0  # before so many tokens no stop string counts


async def stream_text(
    tokens: TokenStream, tokenizer: Tokenizer, options: TextOptions | None = None
) -> AsyncGenerator[TextDelta, None]:
    """Yield the answer of ``tokens``: a piece per token, then one with the finish reason; closes ``tokens``.

    The pieces joined are the answer's text. A stop string ends the request early.

    Raises:
        InvalidInputError: the request can never be served.
        ServingError: the engine stopped or failed.
    """
    options, request = options or TextOptions(), tokens.request
    prompt_ids = request.prompt_token_ids[request.num_encoder_tokens :]
    detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids, skip_special=options.skips_special)
    stop = StopStringFilter(options.stop_strings, keeps_stop=options.keeps_stop)
    scored: list[SampledToken] = []
    num_tokens, last_id = 0, None
    try:
        async for item in tokens:
            if isinstance(item, ScoredPrompt):
                scored += item.tokens[max(0, len(scored) + 1 - item.position) :]  # preempted prompts are scored again
                continue
            if isinstance(item, GenerationResult):
                if (guide := request.sampling.guide) is not None and guide.failure is not None:
                    raise InvalidInputError(f"the grammar became too much for its parser: {guide.failure}")
                rest = stop.push(detokenizer.flush())
                tail = "" if stop.stopped_by else stop.finish()
                by: str | int | None = stop.stopped_by
                if by is None and item.finish_reason == "stop" and last_id in options.stop_token_ids:
                    by = last_id
                yield TextDelta(rest + tail, None, "stop" if stop.stopped_by else item.finish_reason, by)
                return
            if num_tokens == 0 and scored:
                yield TextDelta("", None, scored=tuple(scored))
            num_tokens, last_id = num_tokens + 1, item.token_id
            is_end = item.token_id in request.stop_token_ids
            piece = "" if is_end and not options.keeps_stop else detokenizer.push(item.token_id)
            if num_tokens < options.min_tokens:
                yield TextDelta(stop.pass_on(piece), item)
                continue
            yield TextDelta(stop.push(piece), item)
            if stop.stopped_by:
                yield TextDelta("", None, "stop", stop.stopped_by)
                return
    finally:
        tokens.close()
