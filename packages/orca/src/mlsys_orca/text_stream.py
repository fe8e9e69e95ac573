"""From tokens to text: one request's answer as it grows, whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from mlsys_orca.batch import SampledToken
from mlsys_orca.engine import Engine
from mlsys_orca.scheduler import GenerationRequest, GenerationResult
from mlsys_orca.stop_strings import StopStringFilter
from mlsys_orca.tokenizer import Detokenizer, Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of an answer."""

    text: str  # may be empty while a character, or what may be a stop string, is incomplete
    token: SampledToken | None  # the token that brought it; None for what is left at the end
    finish_reason: FinishReason | None = None  # of the answer, on its last piece


async def stream_text(
    engine: Engine, tokenizer: Tokenizer, request: GenerationRequest, *, stop_strings: Sequence[str] = ()
) -> AsyncGenerator[TextDelta, None]:
    """The answer to ``request``, a piece per token and a last one with the finish reason.

    The pieces joined are the answer's text, without stop token and stop string. A stop string ends the request early.

    Raises:
        InvalidInputError: the request can never be served.
        ServingError: the engine stopped or failed.
    """
    detokenizer = Detokenizer(tokenizer, prompt_ids=request.prompt_token_ids[request.num_encoder_tokens :])
    stop = StopStringFilter(stop_strings)
    async with aclosing(engine.generate(request)) as items:
        async for item in items:
            if isinstance(item, GenerationResult):
                rest = stop.push(detokenizer.flush())
                tail = "" if stop.is_stopped else stop.finish()
                yield TextDelta(rest + tail, None, "stop" if stop.is_stopped else item.finish_reason)
                return
            text = stop.push(detokenizer.push(item.token_id))
            yield TextDelta(text, item)
            if stop.is_stopped:
                yield TextDelta("", None, "stop")
                return
