"""Iteration-level first-come-first-served scheduling: Algorithm 2 of the ORCA paper, pure.

The engine's loop asks for one iteration's batch at a time. A request joins a batch as soon as there is room, reserves
the K/V blocks for all tokens it can ever have when it first runs (so no request can strand halfway), and leaves with
the iteration that finishes it. Between two of its iterations a request is in no batch, so up to ``n_workers`` batches
of disjoint requests can be in flight through a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from mlsys_core.errors import InvalidInputError
from mlsys_core.serving import Finished, FinishReason, WorkerId

from mlsys_orca.batch import BatchBuilder, IterationBatch, IterationOutput, SampledToken, SamplingParams
from mlsys_orca.kv_cache import BlockTables


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request, as the front hands it to the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # at least one
    max_new_tokens: int  # at least one; reserved in full when the request first runs
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()  # ends the answer; the token itself is reported too

    @property
    def max_tokens(self) -> int:
        """K/V slots the request can ever need; the last token is never attended to, yet counted as the paper does."""
        return len(self.prompt_token_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What a finished request produced."""

    tokens: tuple[SampledToken, ...]  # in order; the stop token, if any, is last
    finish_reason: Literal["stop", "length"]


class _State(Enum):
    """Where a request stands; the paper's names."""

    INITIATION = "initiation"  # waits for its first iteration (prefill)
    RUNNING = "running"  # is in a batch in flight
    INCREMENT = "increment"  # has run, waits for its next iteration (decode)


@dataclass(slots=True)
class _Entry:
    request: GenerationRequest
    state: _State = _State.INITIATION
    tokens: list[SampledToken] = field(default_factory=list)
    block_table: tuple[int, ...] = ()  # reserved at the first iteration
    is_cancelled: bool = False  # leaves when the batch it is in comes back


class IterationScheduler:
    """Algorithm 2: iteration-level FCFS with reservation.

    Args:
        block_tables: The workers' K/V blocks; the scheduler is their only owner.
        max_batch_size: Requests per iteration at most.
        max_model_len: Tokens a request may have in all, prompt and answer.
    """

    def __init__(self, block_tables: BlockTables, *, max_batch_size: int, max_model_len: int) -> None:
        if max_batch_size < 1 or max_model_len < 2:
            raise InvalidInputError(
                f"max_batch_size {max_batch_size} must be at least 1, max_model_len {max_model_len} at least 2"
            )
        self._block_tables = block_tables
        self._max_batch_size = max_batch_size
        self._max_model_len = max_model_len
        self._entries: dict[str, _Entry] = {}  # in order of arrival, which is the order of service

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        return len(self._entries)

    def add(self, request: GenerationRequest, now: float) -> None:
        """Admit ``request``.

        Raises:
            InvalidInputError: its id is in use, it has no prompt or asks for no token, or it needs more tokens than the
                model or the K/V cache can ever hold.
        """
        if request.request_id in self._entries:
            raise InvalidInputError(f"request id {request.request_id!r} is in use")
        num_prompt, num_new = len(request.prompt_token_ids), request.max_new_tokens
        if num_prompt < 1 or num_new < 1:
            raise InvalidInputError(f"{num_prompt} prompt tokens and {num_new} to generate: both must be at least 1")
        limit = min(self._max_model_len, self._block_tables.num_blocks * self._block_tables.block_size)
        if request.max_tokens > limit:
            raise InvalidInputError(
                f"the prompt has {num_prompt} tokens and asks for {num_new} more, {request.max_tokens} in all; "
                f"this server takes at most {limit}: shorten the prompt or ask for fewer"
            )
        self._entries[request.request_id] = _Entry(request)

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[GenerationResult]]:
        """Drop a request; one whose batch is in flight leaves when that comes back."""
        entry = self._entries.get(request_id)
        if entry is None:
            return ()
        if entry.state is _State.RUNNING:
            entry.is_cancelled = True
            return ()
        return (self._leave(entry, FinishReason.CANCELLED),)

    def next_batch(self, worker: WorkerId, now: float) -> IterationBatch | None:
        """The paper's ``Select``: by arrival, up to ``max_batch_size``, to the first reservation that fails."""
        builder = BatchBuilder()
        num_selected = 0
        for entry in self._entries.values():
            if num_selected == self._max_batch_size:
                break
            if entry.state is _State.RUNNING:
                continue
            if entry.state is _State.INITIATION and not self._reserve(entry):
                break  # not `continue`: a later, smaller request must not overtake
            self._append(builder, entry)
            entry.state = _State.RUNNING
            num_selected += 1
        return builder.build() if num_selected else None

    def complete(
        self,
        batch: IterationBatch,
        output: IterationOutput,
        now: float,
    ) -> Sequence[Finished[GenerationResult]]:
        """Take one iteration's tokens; who reached a stop token or ``max_new_tokens`` leaves and frees its blocks."""
        finished = []
        sampled = {token.request_id: token for token in output.sampled}
        for part in batch.requests:
            entry = self._entries[part.request_id]
            entry.state = _State.INCREMENT
            if entry.is_cancelled:
                finished.append(self._leave(entry, FinishReason.CANCELLED))
                continue
            token = sampled[part.request_id]
            entry.tokens.append(token)
            if token.token_id in entry.request.stop_token_ids:
                finished.append(self._leave(entry, FinishReason.DONE, "stop"))
            elif len(entry.tokens) == entry.request.max_new_tokens:
                finished.append(self._leave(entry, FinishReason.DONE, "length"))
        return finished

    def fail(
        self,
        batch: IterationBatch,
        error: BaseException,
        now: float,
    ) -> Sequence[Finished[GenerationResult]]:
        """The iteration failed: all its requests leave with that cause."""
        entries = [self._entries[part.request_id] for part in batch.requests]
        return [
            self._leave(entry, FinishReason.CANCELLED if entry.is_cancelled else FinishReason.FAILED, error=error)
            for entry in entries
        ]

    def wake_at(self, now: float) -> float | None:
        """None: only arrivals and completions change what can run."""
        return None

    def _reserve(self, entry: _Entry) -> bool:
        """Take the blocks for every token the request can have, or none."""
        request = entry.request
        if not self._block_tables.can_reserve(request.max_tokens):
            return False
        entry.block_table = self._block_tables.reserve(request.request_id, request.max_tokens)
        return True

    def _append(self, builder: BatchBuilder, entry: _Entry) -> None:
        request = entry.request
        if entry.tokens:  # decode: the last token chosen
            token_ids: tuple[int, ...] = (entry.tokens[-1].token_id,)
            num_computed = len(request.prompt_token_ids) + len(entry.tokens) - 1
        else:  # prefill: the whole prompt
            token_ids, num_computed = request.prompt_token_ids, 0
        builder.add(
            request.request_id,
            token_ids,
            num_computed_tokens=num_computed,
            block_table=entry.block_table,
            sampling=request.sampling,
        )

    def _leave(
        self,
        entry: _Entry,
        reason: FinishReason,
        finish_reason: Literal["stop", "length"] | None = None,
        *,
        error: BaseException | None = None,
    ) -> Finished[GenerationResult]:
        del self._entries[entry.request.request_id]
        if entry.block_table:
            self._block_tables.free(entry.request.request_id)
        result = GenerationResult(tuple(entry.tokens), finish_reason) if finish_reason else None
        return Finished(entry.request.request_id, reason, result, error if reason is FinishReason.FAILED else None)
