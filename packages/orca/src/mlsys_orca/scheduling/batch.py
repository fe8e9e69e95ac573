"""Data between front, scheduler and runner: a request and its result, an iteration's batch and its output.

The scheduler (pure, no torch) fills an :class:`IterationBatch` through a :class:`BatchBuilder`; the runner turns it
into tensors, runs the model once and answers with an :class:`IterationOutput`. All requests' tokens stand flattened
one after the other, because every operator but attention treats them alike (ORCA, section 3.2, selective batching); a
:class:`RequestSlice` says which rows are whose. A *prefill* is the paper's initiation phase, a *decode* its increment
phase.

A batch says everything the runner needs: the runner keeps no state of a request beside the keys and values in the
blocks named here, so a restarted worker, or one more worker, needs nothing but the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Protocol

from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


from typing import Literal

BlockCopy = tuple[int, int]  # (source, destination) K/V block ids
_KEYS_AS_A_TOKEN = 4096  # to attend to as many costs, in small models, as much as all else of a token
MAX_LOGPROBS = 20  # what the OpenAI protocol allows


class Guide(Protocol):
    """Constraint on a request's answer; owner: the request. Its answers depend on its arguments alone."""

    source: str  # the grammar, in llguidance's form
    failure: str | None  # why it could not go on, and ended an answer that does not fit; None: it did

    def allowed(self, answer: Sequence[int]) -> NDArray[np.bool_]:
        """Return the tokens that may follow ``answer``: bool [vocab_size], at least one."""
        ...

    def foresee(self, answer: Sequence[int]) -> None:
        """Prepare for the next question, about ``answer``: its cost may be spent now, beside the forward."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Choice of a request's next token: its parameters, validated here, once, at the edge. Owner: the request.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.9, seed=3).is_greedy
        False
    """

    temperature: float = 0.0  # 0 is greedy: the token with the largest logit
    top_k: int | None = None  # tokens; sample among this many most likely ones, None: among all
    top_p: float = 1.0  # probability; sample among the fewest most likely tokens that together reach it
    seed: int = 0  # keys the request's own random stream; a server draws one for a client that gave none
    num_logprobs: int | None = None  # log-probabilities reported: None: none, 0: the chosen token's, n: also the n best
    num_prompt_logprobs: int | None = None  # likewise of the prompt's tokens, all but the first
    min_p: float = 0.0  # share of the likeliest token's probability; less likely ones are left out
    repetition_penalty: float = 1.0  # divides positive logits of tokens that prompt or answer have, multiplies others
    presence_penalty: float = 0.0  # taken from the logit of each token that the answer has
    frequency_penalty: float = 0.0  # likewise, once for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    min_tokens: int = 0  # tokens of the answer before one of late_token_ids may come
    late_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # no other token may come; None: any may
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # token ids that the answer must not have one after another
    guide: Guide | None = field(default=None, compare=False)  # what the answer must be; None: anything
    is_plain: bool = field(init=False, repr=False, compare=False)  # the logits are taken as they are

    def __post_init__(self) -> None:
        self._check()
        has_penalty = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        has_mask = self.allowed_token_ids is not None or self.bad_sequences or self.guide is not None
        is_plain = not (has_penalty or self.logit_bias or self.min_tokens or has_mask)
        object.__setattr__(self, "is_plain", is_plain)

    def _check(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidInputError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or a positive finite number"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InvalidInputError(f"top_k is {self.top_k}; it must be at least 1, or None for no limit")
        if not 0 < self.top_p <= 1:
            raise InvalidInputError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        for name in ("num_logprobs", "num_prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise InvalidInputError(f"{name} is {count}; it must be None or from 0 to {MAX_LOGPROBS}")
        if not 0 <= self.min_p <= 1:
            raise InvalidInputError(f"min_p is {self.min_p}; it must be from 0 to 1")
        if not (isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InvalidInputError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0, 1 for none")
        if not all(
            map(isfinite, (self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias)))
        ):
            raise InvalidInputError("presence_penalty, frequency_penalty and logit_bias must be finite numbers")
        if self.min_tokens < 0:
            raise InvalidInputError(f"min_tokens is {self.min_tokens}; it must be 0 or more")
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids) - self._late:
            raise InvalidInputError("allowed_token_ids has no token that may come at the answer's start: name another")
        if not all(self.bad_sequences):
            raise InvalidInputError("bad_sequences has an empty one: each must be at least one token")

    @property
    def _late(self) -> frozenset[int]:
        return frozenset(self.late_token_ids) if self.min_tokens else frozenset()

    @property
    def is_greedy(self) -> bool:
        """True if the choice needs no random number."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDetails:
    """Further inputs of the runner for a slice, of requests that ask for more than sampling from the logits."""

    past: tuple[int, ...] = ()  # the prompt and the answer so far; empty if nothing asks for it
    num_prompt_tokens: int = 0  # of past
    num_draft_tokens: int = 0  # the slice's last tokens, guessed: each stays if it is what would have been sampled
    num_prompt_logprobs: int | None = None  # as SamplingParams'; None: none are wanted
    adapter: str | None = None  # whose weights are added to the model's; None: nobody's


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """One request's part of an iteration."""

    request_id: str  # owner: the client's front
    start: int  # row; the request's tokens are rows start to stop - 1 of the flattened batch
    stop: int  # row, exclusive; stop - start is 1 on a decode, the prompt's or chunk's length on a prefill
    num_computed_tokens: int  # tokens whose keys and values are in the blocks already; the first row's position
    block_table: tuple[int, ...]  # K/V block ids in order of position; owner: the scheduler, until it frees them
    sampling: (
        SamplingParams | None
    )  # how to choose the token after the last row; None: more chunks of the prompt follow
    num_encoder_tokens: int = 0  # the request's first tokens, if an encoder reads them; all are in its first iteration
    details: SliceDetails | None = None  # None: a plain request
    num_cached_tokens: int = 0  # of the prompt, found in kept blocks; on the slice that samples its first token
    state_slot: int = 0  # where a recurrent model keeps the request's state; owner: as of the blocks

    @property
    def num_draft_tokens(self) -> int:
        """Guessed tokens at its end."""
        return 0 if self.details is None else self.details.num_draft_tokens

    @property
    def num_tokens(self) -> int:
        """Rows in this iteration."""
        return self.stop - self.start

    @property
    def context_len(self) -> int:
        """Tokens that the last row attends to, itself among them."""
        return self.num_computed_tokens + self.stop - self.start


@dataclass(frozen=True, slots=True)
class IterationBatch:
    """All work of one iteration. Owner: the scheduler; the runner only reads it. Built by :class:`BatchBuilder`."""

    token_ids: tuple[int, ...]  # [num_tokens] vocabulary ids, request after request
    positions: tuple[int, ...]  # [num_tokens] position of each token in its own request, from 0
    requests: tuple[RequestSlice, ...]  # [num_requests] in row order; together they cover every row once
    block_copies: tuple[BlockCopy, ...] = ()  # K/V blocks to copy before this iteration writes any
    is_plain: bool = True  # no request has details
    has_cached: bool = False  # some request has num_cached_tokens

    @property
    def num_tokens(self) -> int:
        """Rows of the flattened batch."""
        return len(self.token_ids)

    @property
    def work(self) -> float:
        """Cost in tokens: each counts once, and once more for every 4,096 tokens that it attends to."""
        return self.num_tokens + sum(self.positions) / _KEYS_AS_A_TOKEN

    @property
    def sampled(self) -> tuple[RequestSlice, ...]:
        """The requests that get a token from this iteration, or several, in row order; the first from its last row."""
        return tuple(request for request in self.requests if request.sampling is not None)


class BatchBuilder:
    """Builder of an :class:`IterationBatch` from requests, one :meth:`add` per request and iteration.

    Example:
        >>> builder = BatchBuilder()
        >>> builder.add("a", (5, 6, 7), num_computed_tokens=0, block_table=(0,), sampling=SamplingParams())
        >>> builder.add("b", (9,), num_computed_tokens=4, block_table=(1,), sampling=SamplingParams())
        >>> builder.build().positions
        (0, 1, 2, 4)
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._requests: list[RequestSlice] = []
        self._block_copies: list[BlockCopy] = []
        self._is_plain = True
        self._has_cached = False

    @property
    def num_tokens(self) -> int:
        """Rows so far."""
        return len(self._token_ids)

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        num_computed_tokens: int,
        block_table: tuple[int, ...],
        sampling: SamplingParams | None,
        num_encoder_tokens: int = 0,
        details: SliceDetails | None = None,
        num_cached_tokens: int = 0,
        state_slot: int = 0,
    ) -> None:
        """Append one request's tokens of this iteration.

        Args:
            request_id: Owner of the tokens; at most once per batch.
            token_ids: The prompt or a chunk of it on prefill, the last token chosen on decode; at least one.
            num_computed_tokens: Tokens of the request that ran in earlier iterations.
            block_table: The request's K/V blocks; they must hold ``num_computed_tokens + len(token_ids)`` tokens.
            sampling: Sampling of the next token; None where the prompt has further chunks to come.
            num_encoder_tokens: Number of first tokens that an encoder reads: all at once, and with at least
                one token for the decoder.
            details: Details of a request that is not plain.
            num_cached_tokens: See :class:`RequestSlice`.
            state_slot: See :class:`RequestSlice`.

        Raises:
            InvalidInputError: there is no token, ``num_computed_tokens`` is negative, or an encoder's tokens are split.
        """
        if not token_ids or num_computed_tokens < 0:
            raise InvalidInputError(
                f"request {request_id!r}: {len(token_ids)} tokens after {num_computed_tokens} computed ones cannot be "
                "scheduled; at least one token after zero or more is"
            )
        if num_computed_tokens <= num_encoder_tokens and (num_computed_tokens or len(token_ids) <= num_encoder_tokens):
            raise InvalidInputError(
                f"request {request_id!r}: an encoder reads its first {num_encoder_tokens} tokens, all at once, and a "
                f"decoder at least one after them; {len(token_ids)} after {num_computed_tokens} cannot be scheduled"
            )
        start = len(self._token_ids)
        self._token_ids.extend(token_ids)
        self._positions.extend(range(num_computed_tokens, num_computed_tokens + len(token_ids)))
        self._requests.append(
            RequestSlice(
                request_id,
                start,
                len(self._token_ids),
                num_computed_tokens,
                block_table,
                sampling,
                num_encoder_tokens,
                details,
                num_cached_tokens,
                state_slot,
            )
        )
        self._has_cached = self._has_cached or num_cached_tokens > 0
        if details is not None:
            self._is_plain = False

    def copy_block(self, source: int, destination: int) -> None:
        """Have the K/V block ``source`` copied to ``destination`` before the iteration.

        All sources are read before a destination is written, so a destination must not be the source of another copy.
        """
        self._block_copies.append((source, destination))

    def build(self) -> IterationBatch:
        """Return the batch of everything added."""
        return IterationBatch(
            tuple(self._token_ids),
            tuple(self._positions),
            tuple(self._requests),
            tuple(self._block_copies),
            self._is_plain,
            self._has_cached,
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token one request got from an iteration. Owner: the receiver."""

    request_id: str
    token_id: int
    logprob: float | None = None  # natural logarithm, of the model's own distribution (temperature 1); None: not asked
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the n best, best first
    num_cached_tokens: int = 0  # with an answer's first token: tokens of its prompt found in kept blocks


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Log-probabilities of a run of a prompt's tokens. Owner: the receiver."""

    request_id: str
    position: int  # of the first of them, at least 1
    tokens: tuple[SampledToken, ...]  # the prompt's own, with their log-probabilities


@dataclass(frozen=True, slots=True)
class IterationOutput:
    """Output of one iteration. Owner: the receiver."""

    # One per request of IterationBatch.sampled, in the same order; one more for each guess of its that was right.
    sampled: tuple[SampledToken, ...]
    scored: tuple[ScoredPrompt, ...] = ()  # of the requests that asked for it


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
