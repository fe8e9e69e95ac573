"""The request pool (ORCA, Figure 4): what every scheduling policy keeps of its requests, in order of arrival.

A policy composes a book and adds which requests run next, in :meth:`next_batch`, with which K/V blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mlsys_core.errors import InvalidInputError
from mlsys_core.serving import Finished, FinishReason

from mlsys_orca.batch import BatchBuilder, IterationBatch, IterationOutput, SampledToken
from mlsys_orca.block_tables import BlockTables
from mlsys_orca.schedulers.request import FinishedBy, GenerationRequest, GenerationResult


class State(Enum):
    """Where a request stands; the paper's names."""

    INITIATION = "initiation"  # holds no K/V blocks: never ran, or was preempted
    RUNNING = "running"  # is in a batch in flight
    INCREMENT = "increment"  # holds K/V blocks, waits for its next iteration


@dataclass(slots=True, eq=False)
class Entry:
    """A request in the pool."""

    request: GenerationRequest
    number: int  # of its arrival: the order of service
    token_ids: list[int]  # the prompt and the answer so far
    state: State = State.INITIATION
    tokens: list[SampledToken] = field(default_factory=list)  # the answer so far
    num_computed_tokens: int = 0  # tokens whose keys and values are in the blocks
    block_table: tuple[int, ...] = ()  # while it holds blocks
    digests: list[bytes] = field(default_factory=list)  # of full blocks of token_ids, as far as they were asked for
    finish_reason: FinishedBy | None = None
    is_cancelled: bool = False  # leaves when the batch it is in comes back

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to run before the next one is sampled: 1 for a decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_joined_tokens(self) -> int:
        """Tokens that the next iteration takes together or not at all: 1, or all that an encoder reads and one more."""
        return 1 if self.num_computed_tokens else 1 + self.request.num_encoder_tokens


class RequestBook:
    """Requests by id, from their arrival until they leave.

    Args:
        block_tables: The K/V blocks; the book takes a leaving request's blocks back.
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
        on_computed: Callable[[Entry], None] | None = None,
    ) -> None:
        if max_batch_size < 1 or max_model_len < 2:
            raise InvalidInputError(
                f"max_batch_size {max_batch_size} must be at least 1, max_model_len {max_model_len} at least 2"
            )
        self.block_tables = block_tables
        self.max_batch_size = max_batch_size
        self.entries: dict[str, Entry] = {}  # in order of arrival
        self.holders: dict[str, Entry] = {}  # those with K/V blocks
        self.num_preemptions = 0  # so far, as the next; both stay 0 under policies that do no such thing
        self.num_cached_tokens = 0  # that admitted requests did not have to compute
        self._max_model_len = max_model_len
        self._on_computed = on_computed
        self._num_arrived = 0

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        return len(self.entries)

    @property
    def num_running(self) -> int:
        """Of those, the ones with K/V blocks; the others wait."""
        return len(self.holders)

    def add(self, request: GenerationRequest, now: float) -> None:
        """Admit ``request``.

        Raises:
            InvalidInputError: its id is in use, it has no prompt or asks for no token, an encoder leaves the decoder
                nothing to begin with, or it needs more tokens than the model or the K/V cache can ever hold.
        """
        if request.request_id in self.entries:
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
        self.entries[request.request_id] = Entry(request, self._num_arrived, list(request.prompt_token_ids))
        self._num_arrived += 1

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[GenerationResult]]:
        """Drop a request; one whose batch is in flight leaves when that comes back."""
        entry = self.entries.get(request_id)
        if entry is None:
            return ()
        if entry.state is State.RUNNING:
            entry.is_cancelled = True
            return ()
        return (self.leave(entry, FinishReason.CANCELLED),)

    def give_blocks(self, entry: Entry, block_table: tuple[int, ...]) -> None:
        """Note that ``entry`` holds ``block_table``."""
        entry.block_table = block_table
        self.holders[entry.request.request_id] = entry

    def take_blocks(self, entry: Entry) -> None:
        """Take all blocks of ``entry`` back; it is to begin anew with the tokens it has."""
        if entry.block_table:
            self.block_tables.free(entry.request.request_id)
            del self.holders[entry.request.request_id]
        entry.block_table, entry.num_computed_tokens, entry.state = (), 0, State.INITIATION

    def append(self, builder: BatchBuilder, entry: Entry, num_tokens: int | None = None) -> None:
        """Put the next ``num_tokens`` tokens of ``entry`` into a batch; None: all that are not computed yet."""
        start = entry.num_computed_tokens
        stop = len(entry.token_ids) if num_tokens is None else start + num_tokens
        builder.add(
            entry.request.request_id,
            entry.token_ids[start:stop],
            num_computed_tokens=start,
            block_table=entry.block_table,
            sampling=entry.request.sampling if stop == len(entry.token_ids) else None,
            num_encoder_tokens=entry.request.num_encoder_tokens,
        )
        entry.state = State.RUNNING

    def complete(
        self, batch: IterationBatch, output: IterationOutput, now: float
    ) -> Sequence[Finished[GenerationResult]]:
        """Take one iteration's tokens; who reached a stop token or ``max_new_tokens`` leaves and frees its blocks."""
        done = self.settle(batch, output)
        return [
            self.leave(entry, FinishReason.CANCELLED if entry.is_cancelled else FinishReason.DONE) for entry in done
        ]

    def settle(self, batch: IterationBatch, output: IterationOutput) -> list[Entry]:
        """Take one iteration's tokens; returns who finished or was cancelled, without having them leave."""
        done = []
        sampled = {token.request_id: token for token in output.sampled}
        for part in batch.requests:
            entry = self.entries[part.request_id]
            entry.state = State.INCREMENT
            entry.num_computed_tokens = part.context_len
            if self._on_computed is not None:
                self._on_computed(entry)
            if part.sampling is not None and entry.finish_reason is None:
                self._accept(entry, sampled[part.request_id])
            if entry.finish_reason or entry.is_cancelled:
                done.append(entry)
        return done

    def fail(self, batch: IterationBatch, error: BaseException, now: float) -> Sequence[Finished[GenerationResult]]:
        """The iteration failed: all its requests leave with that cause."""
        entries = [self.entries[part.request_id] for part in batch.requests]
        return [
            self.leave(entry, FinishReason.CANCELLED if entry.is_cancelled else FinishReason.FAILED, error=error)
            for entry in entries
        ]

    def leave(
        self, entry: Entry, reason: FinishReason, *, error: BaseException | None = None
    ) -> Finished[GenerationResult]:
        """Have ``entry`` leave the pool; its blocks are free."""
        del self.entries[entry.request.request_id]
        self.take_blocks(entry)
        result = None
        if reason is FinishReason.DONE:
            assert entry.finish_reason is not None
            result = GenerationResult(tuple(entry.tokens), entry.finish_reason)
        return Finished(entry.request.request_id, reason, result, error if reason is FinishReason.FAILED else None)

    def wake_at(self, now: float) -> float | None:
        """None: only arrivals and completions change what can run."""
        return None

    def _accept(self, entry: Entry, token: SampledToken) -> None:
        entry.tokens.append(token)
        entry.token_ids.append(token.token_id)
        if token.token_id in entry.request.stop_token_ids:
            entry.finish_reason = "stop"
        elif len(entry.tokens) == entry.request.max_new_tokens:
            entry.finish_reason = "length"
