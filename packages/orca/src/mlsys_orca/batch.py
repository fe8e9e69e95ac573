"""What crosses from the scheduler to the runner and back: one iteration's batch, and what it produced.

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
from dataclasses import dataclass
from math import isfinite

from mlsys_core.errors import InvalidInputError

BlockCopy = tuple[int, int]  # (source, destination) K/V block ids
MAX_LOGPROBS = 20  # what the OpenAI protocol allows


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's next token is chosen; validated here, once, at the edge. Owner: the request.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.9, seed=3).is_greedy
        False
    """

    temperature: float = 0.0  # 0 is greedy: the token with the largest logit
    top_k: int | None = None  # tokens; sample among this many most likely ones, None: among all
    top_p: float = 1.0  # probability; sample among the fewest most likely tokens that together reach it
    seed: int = 0  # keys the request's own random stream; a server draws one for a client that gave none
    num_logprobs: int | None = None  # log-probabilities reported: None: none, 0: the chosen token's, n: also the n best

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidInputError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or a positive finite number"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InvalidInputError(f"top_k is {self.top_k}; it must be at least 1, or None for no limit")
        if not 0 < self.top_p <= 1:
            raise InvalidInputError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise InvalidInputError(f"num_logprobs is {self.num_logprobs}; it must be None or from 0 to {MAX_LOGPROBS}")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice needs no random number."""
        return self.temperature == 0


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

    @property
    def num_tokens(self) -> int:
        """Rows of the flattened batch."""
        return len(self.token_ids)

    @property
    def sampled(self) -> tuple[RequestSlice, ...]:
        """The requests that get a token from this iteration, in row order; each samples from its last row."""
        return tuple(request for request in self.requests if request.sampling is not None)


class BatchBuilder:
    """Flattens requests into an :class:`IterationBatch`, one :meth:`add` per request and iteration.

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

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        num_computed_tokens: int,
        block_table: tuple[int, ...],
        sampling: SamplingParams | None,
        num_encoder_tokens: int = 0,
    ) -> None:
        """Append one request's tokens of this iteration.

        Args:
            request_id: Whose tokens they are; at most once per batch.
            token_ids: The prompt or a chunk of it on prefill, the last token chosen on decode; at least one.
            num_computed_tokens: Tokens of the request that ran in earlier iterations.
            block_table: The request's K/V blocks; they must hold ``num_computed_tokens + len(token_ids)`` tokens.
            sampling: How to choose the next token; None where the prompt has further chunks to come.
            num_encoder_tokens: How many of the request's first tokens an encoder reads: all at once, and with at least
                one token for the decoder.

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
            )
        )

    def copy_block(self, source: int, destination: int) -> None:
        """Have the K/V block ``source`` copied to ``destination`` before the iteration.

        All sources are read before a destination is written, so a destination must not be the source of another copy.
        """
        self._block_copies.append((source, destination))

    def build(self) -> IterationBatch:
        """The batch of everything added."""
        return IterationBatch(
            tuple(self._token_ids), tuple(self._positions), tuple(self._requests), tuple(self._block_copies)
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token one request got from an iteration. Owner: the receiver."""

    request_id: str
    token_id: int
    logprob: float | None = None  # natural logarithm, of the model's own distribution (temperature 1); None: not asked
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the n best, best first


@dataclass(frozen=True, slots=True)
class IterationOutput:
    """What one iteration produced. Owner: the receiver."""

    sampled: tuple[SampledToken, ...]  # one per request of IterationBatch.sampled, in the same order
