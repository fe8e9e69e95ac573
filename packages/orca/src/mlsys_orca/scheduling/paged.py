"""Iteration-level scheduling with K/V blocks on demand: more requests at a time than reservation allows.

A request takes blocks for the tokens it has, and one more when its last is full. If none is free then, the request
that arrived last is preempted: its blocks are freed and it waits, before all that arrived later, to have its prompt
and the tokens it has generated computed again (those were sent, and are not sampled again). Full blocks are kept
under a digest of their contents, for requests that begin with the same tokens, and for preempted ones to come back.
"""

from __future__ import annotations

from mlsys_core.loop import WorkerId

from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.pager import Pager

DEFAULT_WATERMARK = 0.01


class PagedScheduler:
    """First come, first served, blocks on demand.

    Args:
        block_tables: The workers' K/V blocks; the scheduler is their only owner.
        max_batch_size: Requests per iteration at most.
        max_model_len: Tokens a request may have in all, prompt and answer.
        watermark: Share of the blocks that stays free when a request is admitted, for those running to grow.
        prefix_caching: Let requests share blocks with the same contents.

    Raises:
        InvalidInputError: a limit is too low to serve anything, or ``watermark`` is not from 0 to below 1.

    Example:
        >>> from mlsys_orca.scheduling.batch import GenerationRequest
        >>> tables = BlockTables(num_blocks=8, block_size=4)
        >>> scheduler = PagedScheduler(tables, max_batch_size=2, max_model_len=32)
        >>> scheduler.add(GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), max_new_tokens=29), now=0.0)
        >>> scheduler.next_batch(WorkerId(0), now=0.0).token_ids
        (5, 6, 7)
        >>> tables.num_free_blocks  # it may come to need all of them, but has three tokens
        7
    """

    restores_blocks = True  # goes on with requests whose K/V blocks another engine has filled

    def __init__(
        self,
        block_tables: BlockTables,
        *,
        max_batch_size: int,
        max_model_len: int,
        watermark: float = DEFAULT_WATERMARK,
        prefix_caching: bool = True,
    ) -> None:
        self._pager = Pager(
            block_tables,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            watermark=watermark,
            prefix_caching=prefix_caching,
        )
        self.pool = pool = self._pager.pool
        self.add, self.cancel, self.wake_at = pool.add, pool.cancel, pool.wake_at
        self.complete, self.fail = pool.complete, pool.fail

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        return self.pool.num_unfinished

    def next_batch(self, worker: WorkerId, now: float) -> IterationBatch | None:
        """Return the requests by arrival, up to ``max_batch_size``, to the first that finds no blocks."""
        builder = BatchBuilder()
        num_selected = 0
        for sequence in self.pool.sequences.values():
            if num_selected == self.pool.max_batch_size:
                break
            if not self.pool.may_run(sequence):
                continue
            if not self._pager.provide(sequence, builder):
                break  # a later, smaller request must not overtake
            self.pool.append(builder, sequence)
            num_selected += 1
        return builder.build() if num_selected else None
