"""A front's request to the engine, and its result: the same under every scheduling policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mlsys_orca.scheduling.batch import SampledToken, SamplingParams, ScoredPrompt

FinishedBy = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Work done on a request by an engine that is no more."""

    answer: tuple[int, ...]  # tokens that were generated, and are not generated again
    block_table: tuple[int, ...] = ()  # K/V blocks that still hold its first tokens; empty: none do
    num_computed_tokens: int = 0  # tokens whose keys and values are in these blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request, as the front hands it to the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # at least one
    max_new_tokens: int  # at least one
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()  # ends the answer; the token itself is reported too
    num_encoder_tokens: int = 0  # the prompt's first tokens, if an encoder reads them; the decoder begins with the rest
    adapter: str | None = None  # whose weights are added to the model's; None: nobody's
    progress: Progress | None = None  # where to go on; None: from the beginning

    def finish_reason(self, num_tokens: int, last_token_id: int) -> FinishedBy | None:
        """Return the reason why an answer of ``num_tokens`` is complete with its last; None: it is not."""
        if last_token_id in self.stop_token_ids:
            return "stop"
        return "length" if num_tokens >= self.max_new_tokens else None

    @property
    def max_tokens(self) -> int:
        """K/V slots the request can ever need; the last token is never attended to, yet counted as the paper does."""
        return len(self.prompt_token_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Result of a finished request."""

    tokens: tuple[SampledToken, ...]  # in order; the stop token, if any, is last
    finish_reason: FinishedBy
    scored: tuple[ScoredPrompt, ...] = ()  # the prompt's log-probabilities, if they were asked for
