"""The request pool (ORCA, Figure 4): what every scheduling policy keeps of its requests, in order of arrival.

A policy composes a pool and adds which requests run next, in :meth:`next_batch`, with which K/V blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Finished, FinishReason

from mlsys_orca.scheduling.batch import (
    BatchBuilder,
    FinishedBy,
    GenerationRequest,
    GenerationResult,
    IterationBatch,
    IterationOutput,
    Progress,
    RequestSlice,
    SampledToken,
    ScoredPrompt,
    SliceDetails,
)
from mlsys_orca.scheduling.block_tables import BlockTables

MAX_SCORED_ROWS = (
    256  # of a prompt whose log-probabilities are wanted, in one iteration: each is a row of the vocabulary
)


NOBODY = ""  # no request's id


class State(Enum):
    """State of a sequence between iterations (the paper's initiation and increment phases)."""

    PREFILL = "prefill"  # holds no K/V blocks: never ran, or was preempted
    RUNNING = "running"  # is in a batch in flight
    DECODE = "decode"  # holds K/V blocks, waits for its next iteration


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request in the pool, with its tokens and K/V blocks."""

    request: GenerationRequest
    number: int  # of its arrival: the order of service
    token_ids: list[int]  # the prompt and the answer so far
    state: State = State.PREFILL
    tokens: list[SampledToken] = field(default_factory=list)  # the answer so far
    num_cached_tokens: int = 0  # of the prompt, that it found computed when it first ran
    num_computed_tokens: int = 0  # tokens whose keys and values are in the blocks
    block_table: tuple[int, ...] = ()  # while it holds blocks
    digests: list[bytes] = field(default_factory=list)  # of full blocks of token_ids, as far as they were asked for
    finish_reason: FinishedBy | None = None
    is_cancelled: bool = False  # leaves when the batch it is in comes back
    scored: list[ScoredPrompt] = field(default_factory=list)
    ngrams: NgramIndex | None = None  # made with the first draft

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to run before the next one is sampled: 1 for a decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_joined_tokens(self) -> int:
        """Tokens that the next iteration takes together or not at all: 1, or all that an encoder reads and one more."""
        return 1 if self.num_computed_tokens else 1 + self.request.num_encoder_tokens


class RequestPool:
    """Requests by id, from their arrival until they leave.

    Args:
        block_tables: The K/V blocks; the pool takes a leaving request's blocks back.
        max_batch_size: Requests per iteration at most.
        max_model_len: Tokens a request may have in all, prompt and answer.
        on_computed: Called with a request after each of its iterations, before it may leave.

    Raises:
        InvalidInputError: a limit is too low to serve anything.
    """

    def __init__(
        self,
        block_tables: BlockTables,
        *,
        max_batch_size: int,
        max_model_len: int,
        on_computed: Callable[[SequenceState], None] | None = None,
    ) -> None:
        if max_batch_size < 1 or max_model_len < 2:
            raise InvalidInputError(
                f"max_batch_size {max_batch_size} must be at least 1, max_model_len {max_model_len} at least 2"
            )
        self.block_tables = block_tables
        self.max_batch_size = max_batch_size
        self.sequences: dict[str, SequenceState] = {}  # in order of arrival
        self.holders: dict[str, SequenceState] = {}  # those with K/V blocks
        self.num_preemptions = 0  # so far, as the next; both stay 0 under policies that do no such thing
        self.num_cached_tokens = 0  # that admitted requests did not have to compute
        self._max_model_len = max_model_len
        self.num_draft_tokens = 0  # guesses behind a decode at most; 0: none
        self.num_guessed = 0  # tokens so far, as the next
        self.num_right = 0  # guessed ones that stayed
        self.alone: str | None = None  # the only request that may run, or NOBODY; all others are held. None: all may
        self.on_placed: Callable[[str], None] | None = None  # called with a request's id when it gets its first blocks
        self.on_preempted: Callable[[str], None] | None = None  # likewise, when others are about to get its blocks
        self._on_computed = on_computed
        self._num_arrived = 0

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        return len(self.sequences)

    @property
    def num_running(self) -> int:
        """Number of unfinished requests with K/V blocks; the others wait."""
        return len(self.holders)

    def add(self, request: GenerationRequest, now: float) -> None:
        """Admit ``request``.

        Raises:
            InvalidInputError: its id is in use, it has no prompt or asks for no token, an encoder leaves the decoder
                nothing to begin with, or it needs more tokens than the model or the K/V cache can ever hold.
        """
        if request.request_id in self.sequences:
            raise InvalidInputError(f"request id {request.request_id!r} is in use")
        num_prompt, num_new = len(request.prompt_token_ids), request.max_new_tokens
        if num_prompt < 1 or num_new < 1:
            raise InvalidInputError(f"{num_prompt} prompt tokens and {num_new} to generate: both must be at least 1")
        if not 0 <= request.num_encoder_tokens < num_prompt:
            raise InvalidInputError(
                f"an encoder cannot read {request.num_encoder_tokens} of {num_prompt} prompt tokens: it must leave at "
                "least one for the decoder to begin with"
            )
        limit = min(self._max_model_len, self.block_tables.num_blocks * self.block_tables.block_size)
        if request.max_tokens > limit:
            raise InvalidInputError(
                f"the prompt has {num_prompt} tokens and asks for {num_new} more, {request.max_tokens} in all; "
                f"this server takes at most {limit}: shorten the prompt or ask for fewer"
            )
        sequence = SequenceState(request, self._num_arrived, list(request.prompt_token_ids))
        self.sequences[request.request_id] = sequence
        self._num_arrived += 1
        if request.progress is not None:
            self._go_on(sequence, request.progress)

    def _go_on(self, sequence: SequenceState, progress: Progress) -> None:
        """Bring a new sequence to where another engine had it, with the blocks that were restored for it."""
        request_id = sequence.request.request_id
        sequence.token_ids += progress.answer
        sequence.tokens = [SampledToken(request_id, token) for token in progress.answer]
        if progress.block_table:
            sequence.block_table, sequence.state = progress.block_table, State.DECODE
            sequence.num_computed_tokens = progress.num_computed_tokens
            self.holders[request_id] = sequence

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[GenerationResult]]:
        """Drop a request; one whose batch is in flight leaves when that comes back."""
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return ()
        if sequence.state is State.RUNNING:
            sequence.is_cancelled = True
            return ()
        return (self.finish(sequence, FinishReason.CANCELLED),)

    def give_blocks(self, sequence: SequenceState, block_table: tuple[int, ...]) -> None:
        """Note that ``sequence`` holds ``block_table``."""
        if self.on_placed is not None and not sequence.block_table and not sequence.tokens:
            self.on_placed(sequence.request.request_id)
        sequence.block_table = block_table
        self.holders[sequence.request.request_id] = sequence

    def take_blocks(self, sequence: SequenceState) -> None:
        """Take all blocks of ``sequence`` back; it is to begin anew with the tokens it has."""
        if sequence.block_table:
            self.block_tables.free(sequence.request.request_id)
            del self.holders[sequence.request.request_id]
        sequence.block_table, sequence.num_computed_tokens, sequence.state = (), 0, State.PREFILL

    def may_run(self, sequence: SequenceState) -> bool:
        """Return whether ``sequence`` can be in the next batch: it is in none, and not held for another to be alone."""
        return sequence.state is not State.RUNNING and self.alone in (None, sequence.request.request_id)

    def preempt(self, sequence: SequenceState) -> None:
        """Take all blocks of ``sequence`` for others; it is to wait with all its tokens, to be computed again."""
        self.take_blocks(sequence)
        self.num_preemptions += 1
        if self.on_preempted is not None:
            self.on_preempted(sequence.request.request_id)

    def preempt_held(self) -> bool:
        """Preempt the last to arrive of those that are held; return False if none of them has blocks."""
        held = [
            sequence
            for sequence in self.holders.values()
            if sequence.state is not State.RUNNING and not self.may_run(sequence)
        ]
        if not held:
            return False
        self.preempt(max(held, key=lambda sequence: sequence.number))
        return True

    def append(self, builder: BatchBuilder, sequence: SequenceState, num_tokens: int | None = None) -> None:
        """Put the next ``num_tokens`` tokens of ``sequence`` into a batch; None: all that are not computed yet.

        Of a prompt whose log-probabilities are wanted it may be fewer; a decode may be followed by guesses.
        """
        request, start = sequence.request, sequence.num_computed_tokens
        sampling = request.sampling
        stop = len(sequence.token_ids) if num_tokens is None else start + num_tokens
        if sampling.num_prompt_logprobs is not None and start < len(request.prompt_token_ids):
            stop = min(stop, start + MAX_SCORED_ROWS)
        token_ids = sequence.token_ids[start:stop]
        draft = self._draft(sequence) if self.num_draft_tokens and stop == len(sequence.token_ids) == start + 1 else []
        details = None
        needs_past = not sampling.is_plain or sampling.num_prompt_logprobs is not None
        if needs_past or draft or request.adapter is not None:
            details = SliceDetails(
                past=tuple(sequence.token_ids) if needs_past else (),
                num_prompt_tokens=len(request.prompt_token_ids),
                num_draft_tokens=len(draft),
                num_prompt_logprobs=sampling.num_prompt_logprobs,
                adapter=request.adapter,
            )
        is_sampled = stop == len(sequence.token_ids)
        builder.add(
            request.request_id,
            token_ids + draft,
            num_computed_tokens=start,
            block_table=sequence.block_table,
            sampling=sampling if is_sampled else None,
            num_encoder_tokens=request.num_encoder_tokens,
            details=details,
            num_cached_tokens=sequence.num_cached_tokens if is_sampled and not sequence.tokens else 0,
            state_slot=self.block_tables.state_slot(request.request_id),
        )
        sequence.state = State.RUNNING

    def _draft(self, sequence: SequenceState) -> list[int]:
        """Return draft tokens that fit the request's blocks, and its answer beside the sure token."""
        if sequence.ngrams is None:
            sequence.ngrams = NgramIndex()
        room = min(
            self.num_draft_tokens,
            sequence.request.max_tokens - len(sequence.token_ids) - 1,
            len(sequence.block_table) * self.block_tables.block_size - len(sequence.token_ids),
        )
        return sequence.ngrams.draft(sequence.token_ids, room) if room > 0 else []

    def complete(
        self, batch: IterationBatch, output: IterationOutput, now: float
    ) -> Sequence[Finished[GenerationResult]]:
        """Take one iteration's tokens; who reached a stop token or ``max_new_tokens`` leaves and frees its blocks."""
        done = self.update_from_output(batch, output)
        return [
            self.finish(sequence, FinishReason.CANCELLED if sequence.is_cancelled else FinishReason.DONE)
            for sequence in done
        ]

    def update_from_output(self, batch: IterationBatch, output: IterationOutput) -> list[SequenceState]:
        """Take one iteration's tokens; returns who finished or was cancelled, without having them leave."""
        done = []
        for scored in output.scored:
            self.sequences[scored.request_id].scored.append(scored)
        sampled, index = output.sampled, 0
        for part in batch.requests:
            sequence = self.sequences[part.request_id]
            sequence.state = State.DECODE
            sequence.num_computed_tokens = part.context_len
            if part.sampling is not None:
                if sequence.finish_reason is None:
                    self._accept(sequence, sampled[index])
                index += 1
                if part.num_draft_tokens:
                    index = self._accept_guesses(sequence, part, sampled, index)
            if self._on_computed is not None:
                self._on_computed(sequence)
            if sequence.finish_reason or sequence.is_cancelled:
                done.append(sequence)
        return done

    def fail(self, batch: IterationBatch, error: BaseException, now: float) -> Sequence[Finished[GenerationResult]]:
        """End all requests of the failed iteration with its error."""
        sequences = [self.sequences[part.request_id] for part in batch.requests]
        return [
            self.finish(sequence, FinishReason.CANCELLED if sequence.is_cancelled else FinishReason.FAILED, error=error)
            for sequence in sequences
        ]

    def finish(
        self, sequence: SequenceState, reason: FinishReason, *, error: BaseException | None = None
    ) -> Finished[GenerationResult]:
        """Have ``sequence`` leave the pool; its blocks are free."""
        del self.sequences[sequence.request.request_id]
        self.take_blocks(sequence)
        result = None
        if reason is FinishReason.DONE:
            assert sequence.finish_reason is not None
            result = GenerationResult(tuple(sequence.tokens), sequence.finish_reason, tuple(sequence.scored))
        return Finished(sequence.request.request_id, reason, result, error if reason is FinishReason.FAILED else None)

    def wake_at(self, now: float) -> float | None:
        """Return None: only arrivals and completions change what can run."""
        return None

    def _accept_guesses(
        self, sequence: SequenceState, part: RequestSlice, sampled: Sequence[SampledToken], index: int
    ) -> int:
        """Take the tokens from ``index`` on that right guesses gave; returns where the next request's begin."""
        first = index
        while index < len(sampled) and sampled[index].request_id == part.request_id:
            if sequence.finish_reason is None:  # right guesses behind a stop token are no part of the answer
                self._accept(sequence, sampled[index])
            index += 1
        self.num_guessed += part.num_draft_tokens
        self.num_right += index - first
        num_wrong = part.num_draft_tokens - (index - first)  # their keys and values are overwritten
        sequence.num_computed_tokens = min(part.context_len - num_wrong, len(sequence.token_ids))
        return index

    def _accept(self, sequence: SequenceState, token: SampledToken) -> None:
        sequence.tokens.append(token)
        sequence.token_ids.append(token.token_id)
        sequence.finish_reason = sequence.request.finish_reason(len(sequence.tokens), token.token_id)


_NGRAM = 3  # tokens that must have been seen before: with two most guesses are wrong


class NgramIndex:
    """Index of the last position of each run of three tokens, in a list that only grows.

    Example:
        >>> index, tokens = NgramIndex(), [1, 2, 3, 4, 5, 9, 1, 2, 3]
        >>> index.draft(tokens, 2)
        [4, 5]
    """

    __slots__ = ("_ends", "_num_read")

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after it
        self._num_read = _NGRAM - 1  # tokens whose n-grams are known, but for the last one's

    def draft(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to ``max_tokens`` tokens that followed the last three where they were seen before; else none."""
        # The n-gram at the very end is entered in the next call: it must not find itself.
        for end in range(self._num_read + 1, len(token_ids)):
            self._ends[tuple(token_ids[end - _NGRAM : end])] = end
        self._num_read = max(self._num_read, len(token_ids) - 1)
        start = self._ends.get(tuple(token_ids[-_NGRAM:]))
        return [] if start is None else list(token_ids[start : start + max_tokens])
