"""The baseline: whole batches, one after the other, as FasterTransformer serves below Triton (ORCA, C1 and 6.2).

A batch is formed of those that wait, up to ``max_batch_size``, and runs until all of it has finished. Who arrives
meanwhile waits, and who finishes early gets nothing before the batch ends: tokens are not streamed, all results leave
with the batch's last iteration. Nothing is injected before that either; a pipeline is filled by splitting the batch
into microbatches (Figure 8b).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Finished, FinishReason, WorkerId

from mlsys_orca.scheduling.batch import BatchBuilder, GenerationResult, IterationBatch, IterationOutput
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.request_pool import RequestPool, SequenceState, State


class RequestLevelScheduler:
    """One batch at a time, to its end. K/V blocks are reserved in full, as in Algorithm 2.

    Args:
        block_tables: The workers' K/V blocks; the scheduler is their only owner.
        max_batch_size: Requests per batch at most.
        max_model_len: Tokens a request may have in all, prompt and answer.
        microbatch_size: Requests per iteration at most; None: the whole batch.
        lockstep: True does what FasterTransformer does: the first iteration takes as many tokens of each prompt as the
            shortest has, further ones one more of each, and who has finished is computed on beside the others. Tokens
            that an encoder reads do not count for that, and all run at first. False is kinder: prompts run whole, and
            the rows of finished requests are left out.

    Raises:
        InvalidInputError: a limit is too low to serve anything.

    Example:
        >>> from mlsys_orca.scheduling.batch import GenerationRequest
        >>> scheduler = RequestLevelScheduler(BlockTables(num_blocks=8), max_batch_size=2, max_model_len=64)
        >>> for name, prompt in (("a", (5, 6, 7)), ("b", (8,)), ("c", (9,))):
        ...     scheduler.add(GenerationRequest(request_id=name, prompt_token_ids=prompt, max_new_tokens=2), now=0.0)
        >>> scheduler.next_batch(WorkerId(0), now=0.0).token_ids
        (5, 8)
    """

    streams_tokens = False  # fronts get all of a request's tokens with its result
    restores_blocks = True  # goes on with requests whose K/V blocks another engine has filled, as one batch

    def __init__(
        self,
        block_tables: BlockTables,
        *,
        max_batch_size: int,
        max_model_len: int,
        microbatch_size: int | None = None,
        lockstep: bool = True,
    ) -> None:
        if microbatch_size is not None and microbatch_size < 1:
            raise InvalidInputError(f"microbatch_size is {microbatch_size}; it must be at least 1, or None")
        self.pool = RequestPool(block_tables, max_batch_size=max_batch_size, max_model_len=max_model_len)
        self.add, self.wake_at = self.pool.add, self.pool.wake_at
        self._microbatch_size = microbatch_size or max_batch_size
        self._lockstep = lockstep
        self._microbatches: deque[list[SequenceState]] = deque()  # of the batch that runs; whose turn it is first
        self._first_len = 0  # tokens of each decoder in the first iteration, if in lockstep

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        return self.pool.num_unfinished

    def next_batch(self, worker: WorkerId, now: float) -> IterationBatch | None:
        """Return the next iteration of the batch or of the microbatch in turn; form a new batch if none is left."""
        self._form_if_needed()
        for _ in range(len(self._microbatches)):
            microbatch = self._microbatches[0]
            self._microbatches.rotate(-1)
            rows = [sequence for sequence in microbatch if sequence.request.request_id in self.pool.holders]
            active = [sequence for sequence in rows if not sequence.finish_reason and self.pool.may_run(sequence)]
            if active:
                builder = BatchBuilder()
                for sequence in rows if self._lockstep and self.pool.alone is None else active:
                    self.pool.append(builder, sequence, self._num_tokens(sequence))
                return builder.build()
        return None

    def cancel(self, request_id: str, now: float) -> Sequence[Finished[GenerationResult]]:
        """Drop a request; one whose iteration is in flight leaves when that comes back."""
        return [*self.pool.cancel(request_id, now), *self._end_batch()]

    def complete(
        self, batch: IterationBatch, output: IterationOutput, now: float
    ) -> Sequence[Finished[GenerationResult]]:
        """Take one iteration's tokens; those that finished leave together when the whole batch has finished."""
        left = []
        for sequence in self.pool.update_from_output(batch, output):
            if sequence.is_cancelled:
                left.append(self.pool.finish(sequence, FinishReason.CANCELLED))
            elif self.pool.alone is not None:  # it has no batch beside it
                left.append(self.pool.finish(sequence, FinishReason.DONE))
            else:  # its last token's row is computed again in each further iteration of its microbatch
                sequence.num_computed_tokens = len(sequence.token_ids) - 1
        return [*left, *self._end_batch()]

    def fail(self, batch: IterationBatch, error: BaseException, now: float) -> Sequence[Finished[GenerationResult]]:
        """End all requests of the failed iteration's batch with its error, finished or not."""
        return [*self.pool.fail(batch, error, now), *self._end_batch()]

    def _form_if_needed(self) -> None:
        """Form a batch if the last has left; form it anew of all that hold blocks if more do than it has.

        The latter were brought by another engine, or were held for one to be alone, who then is all of the batch.
        """
        if not self.pool.holders or self.pool.alone is not None:
            self._admit()
        batch = [sequence for sequence in self.pool.holders.values() if self.pool.may_run(sequence)]
        known = {id(sequence) for microbatch in self._microbatches for sequence in microbatch}
        if all(id(sequence) in known for sequence in batch):
            return
        if all(sequence.state is not State.RUNNING for sequence in self.pool.holders.values()):
            self._form(sorted(batch, key=lambda sequence: sequence.number))

    def _admit(self) -> None:
        """Reserve blocks by arrival, up to ``max_batch_size``, to the first request whose blocks do not fit."""
        tables = self.pool.block_tables
        for sequence in self.pool.sequences.values():
            request = sequence.request
            if sequence.block_table or not self.pool.may_run(sequence):
                continue
            while not tables.can_reserve(request.max_tokens) and self.pool.preempt_held():
                pass
            is_full = len(self.pool.holders) >= self.pool.max_batch_size and self.pool.alone is None
            if is_full or not tables.can_reserve(request.max_tokens):
                break
            self.pool.give_blocks(sequence, tables.reserve(request.request_id, request.max_tokens))

    def _form(self, batch: list[SequenceState]) -> None:
        self._first_len = min(
            (len(sequence.token_ids) - sequence.request.num_encoder_tokens for sequence in batch), default=0
        )
        starts = range(0, len(batch), self._microbatch_size)
        self._microbatches = deque(batch[start : start + self._microbatch_size] for start in starts)

    def _num_tokens(self, sequence: SequenceState) -> int | None:
        if not self._lockstep:
            return None
        return 1 if sequence.num_computed_tokens else sequence.request.num_encoder_tokens + self._first_len

    def _end_batch(self) -> list[Finished[GenerationResult]]:
        batch = list(self.pool.holders.values())
        if not all(sequence.finish_reason for sequence in batch):
            return []
        return [self.pool.finish(sequence, FinishReason.DONE) for sequence in batch]
