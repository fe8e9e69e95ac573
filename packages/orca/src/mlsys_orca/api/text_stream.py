"""Turn tokens into text: one request's answer as it grows, whole characters only, cut at stop strings.

And the parts that an answer's text is told apart into, in no protocol's words: text, reasoning, calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mlsys_core.errors import InvalidInputError

from mlsys_orca.engine.streams import TokenStream
from mlsys_orca.scheduling.batch import GenerationResult, SampledToken, ScoredPrompt
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


class StopStringFilter:
    """Filter that passes text on as soon as it can no longer be part of a stop string.

    Example:
        >>> stop = StopStringFilter(["END"])
        >>> [stop.push(piece) for piece in ("one E", "N", "x EN", "D two")]
        ['one ', '', 'ENx ', '']
        >>> stop.stopped_by
        'END'
    """

    def __init__(self, stop_strings: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._keeps_stop = keeps_stop  # the stop string itself is passed on too
        self._held = ""  # text that may turn out to begin a stop string
        self.stopped_by: str | None = None

    @property
    def is_stopped(self) -> bool:
        """True if a stop string was complete."""
        return self.stopped_by is not None

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown of it and of what was held back."""
        if self.stopped_by is not None:
            return ""
        self._held += text
        # The first stop string to be complete counts, so that the borders between pieces make no difference.
        found = [
            (start + len(stop), start, stop) for stop in self._stop_strings if (start := self._held.find(stop)) >= 0
        ]
        if found:
            stop_at, start, self.stopped_by = min(found)
            shown, self._held = self._held[: stop_at if self._keeps_stop else start], ""
            return shown
        num_held = max((self._overlap(stop) for stop in self._stop_strings), default=0)
        split = len(self._held) - num_held
        shown, self._held = self._held[:split], self._held[split:]
        return shown

    def pass_on(self, text: str) -> str:
        """Take the next piece as text that cannot be part of a stop string."""
        shown, self._held = self._held + text, ""
        return shown

    def finish(self) -> str:
        """End the answer; return the text that was held back, which was no stop string after all."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest proper beginning of ``stop`` that the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: it goes on with the piece before it if that is of the same kind, and this has no name."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""  # of a call: its arguments, as JSON
    name: str | None = None  # of the function whose call begins here

    def follows(self, other: Part) -> bool:
        """Return whether this piece goes on with ``other``."""
        return self.kind == other.kind and self.name is None


def call_id(prefix: str, answer_id: str, number: int, *, choice: int = 0) -> str:
    """Return the id of a call, which clients give back with its result; the same whenever the answer is made again.

    Args:
        prefix: The protocol's.
        answer_id: The answer's.
        number: Index of the call in its choice.
        choice: Index of the choice.
    """
    place = f"{answer_id}/{choice}/{number}".encode()
    return f"{prefix}_{hashlib.blake2b(place, digest_size=12).hexdigest()}"


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return ``parts`` with pieces that belong together as one.

    Example:
        >>> joined([Part("text", "a"), Part("text", "b"), Part("call", name="f"), Part("call", "{}")])
        [Part(kind='text', text='ab', name=None), Part(kind='call', text='{}', name='f')]
    """
    whole: list[Part] = []
    for part in parts:
        if whole and part.follows(whole[-1]):
            whole[-1] = replace(whole[-1], text=whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole


def text_of(parts: Iterable[Part], kind: Literal["reasoning", "text"]) -> str:
    """Return the text of all parts of that kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def calls_of(parts: Iterable[Part]) -> list[Part]:
    """Return the calls among parts that are joined."""
    return [part for part in parts if part.kind == "call"]
