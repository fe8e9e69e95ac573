"""Iteration-level first-come-first-served scheduling: Algorithm 2 of the Orca dissertation (1 of the paper), pure.

The engine's loop asks for one iteration's batch at a time. A request joins a batch as soon as there is room, reserves
the K/V blocks for all tokens it can ever have when it first runs (so no request can strand halfway), and leaves with
the iteration that finishes it. Between two of its iterations a request is in no batch, so up to ``n_workers`` batches
of disjoint requests can be in flight through a pipeline; how many is the executor's to say (``max_in_flight``).
"""

from __future__ import annotations

from mlsys_core.loop import WorkerId

from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.request_pool import RequestPool, SequenceState, State


class IterationScheduler:
    """Algorithm 2: iteration-level FCFS with reservation.

    Args:
        block_tables: The workers' K/V blocks; the scheduler is their only owner.
        max_batch_size: Requests per iteration at most.
        max_model_len: Tokens a request may have in all, prompt and answer.

    Raises:
        InvalidInputError: a limit is too low to serve anything.

    Example:
        >>> from mlsys_orca.scheduling.batch import GenerationRequest
        >>> scheduler = IterationScheduler(BlockTables(num_blocks=8), max_batch_size=2, max_model_len=64)
        >>> scheduler.add(GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), max_new_tokens=9), now=0.0)
        >>> scheduler.next_batch(WorkerId(0), now=0.0).token_ids
        (5, 6, 7)
    """

    restores_blocks = True  # goes on with requests whose K/V blocks another engine has filled

    def __init__(self, block_tables: BlockTables, *, max_batch_size: int, max_model_len: int) -> None:
        self.pool = pool = RequestPool(block_tables, max_batch_size=max_batch_size, max_model_len=max_model_len)
        self.add, self.cancel, self.wake_at = pool.add, pool.cancel, pool.wake_at
        self.complete, self.fail = pool.complete, pool.fail

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        return self.pool.num_unfinished

    def next_batch(self, worker: WorkerId, now: float) -> IterationBatch | None:
        """Select requests by arrival, up to ``max_batch_size``, to the first reservation that fails.

        This is the paper's ``Select``.
        """
        builder = BatchBuilder()
        num_selected, num_seen, is_full = 0, 0, False  # num_seen: of those that hold blocks
        for sequence in self.pool.sequences.values():
            if num_selected == self.pool.max_batch_size:
                break
            if not self.pool.may_run(sequence):
                num_seen += bool(sequence.block_table)
                continue
            if sequence.state is State.PREFILL and (is_full or not self._reserve(sequence)):
                is_full = True  # a later, smaller request must not overtake
                if num_seen == len(self.pool.holders):
                    break
                continue  # one that has its blocks comes later: this one lost its own while it was held
            num_seen += 1
            self.pool.append(builder, sequence)
            num_selected += 1
        return builder.build() if num_selected else None

    def _reserve(self, sequence: SequenceState) -> bool:
        """Take the blocks for every token the request can have, or none."""
        tables, request = self.pool.block_tables, sequence.request
        while not tables.can_reserve(request.max_tokens):
            if not self.pool.preempt_held():
                return False
        self.pool.give_blocks(sequence, tables.reserve(request.request_id, request.max_tokens))
        return True
