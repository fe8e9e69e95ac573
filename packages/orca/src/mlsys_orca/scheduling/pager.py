"""K/V blocks on demand for the policies that do not reserve: admission, growth and preemption, in order of arrival.

One rule keeps such a policy free of deadlock and starvation: whoever needs blocks that are not free takes them from
the request that arrived last, if that is after its own arrival and not in flight. So the earliest request can always
get what it needs, at the latest when the batches in flight are back, and every request is the earliest at some time.
"""

from __future__ import annotations

from math import ceil

from mlsys_core.errors import InvalidInputError

from mlsys_orca.scheduling.batch import BatchBuilder
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.prefix_cache import extend_digests
from mlsys_orca.scheduling.request_pool import Entry, RequestBook, State


class Pager:
    """Gives the requests of its book their blocks.

    Args:
        block_tables: The K/V blocks.
        max_batch_size: As the book's.
        max_model_len: As the book's.
        watermark: Share of the blocks, below 1, that stays free when a request is admitted, so that those running can
            grow for a while; without others that hold blocks it does not apply.
        prefix_caching: Whether requests share blocks with the same contents. Those with an encoder never do: what it
            makes of a token depends on the tokens after it as well.

    Raises:
        InvalidInputError: ``watermark`` is not from 0 to below 1, or a limit is too low to serve anything.
    """

    def __init__(
        self,
        block_tables: BlockTables,
        *,
        max_batch_size: int,
        max_model_len: int,
        watermark: float,
        prefix_caching: bool,
    ) -> None:
        if not 0 <= watermark < 1:
            raise InvalidInputError(f"watermark is {watermark}; it is a share of the K/V blocks, from 0 to below 1")
        self.book = RequestBook(
            block_tables,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            on_computed=self._publish if prefix_caching else None,
        )
        self._block_tables = block_tables
        self._num_kept_free = ceil(watermark * block_tables.num_blocks)
        self._prefix_caching = prefix_caching

    def provide(self, entry: Entry, builder: BatchBuilder) -> bool:
        """See to it that ``entry`` has blocks for all the tokens it has; False if it must wait for some.

        It must be put into the batch of ``builder`` then: what is in a batch is not preempted.
        """
        if entry.state is State.INITIATION:
            return self._admit(entry, builder)
        return self._grow(entry)

    def _admit(self, entry: Entry, builder: BatchBuilder) -> bool:
        request, digests = entry.request, entry.digests
        if self._prefix_caching and not request.num_encoder_tokens:
            extend_digests(digests, entry.token_ids, self._block_tables.block_size, root=_root_of(entry))
        if request.sampling.num_prompt_logprobs is not None:
            digests = []  # what is not computed has no logits
        while True:
            placement = self._block_tables.place(
                entry.request.request_id,
                len(entry.token_ids),
                digests,
                keep_free=self._num_kept_free if self.book.holders else 0,
            )
            if placement is not None:
                break
            if not self._preempt_one_after(entry):
                return False
        self.book.give_blocks(entry, placement.block_table)
        entry.num_computed_tokens = placement.num_cached_tokens
        self.book.num_cached_tokens += placement.num_cached_tokens
        if placement.block_copy is not None:
            builder.copy_block(*placement.block_copy)
        return True

    def _grow(self, entry: Entry) -> bool:
        num_tokens = len(entry.token_ids)
        while True:
            block_table = self._block_tables.grow(entry.request.request_id, num_tokens)
            if block_table is not None:
                entry.block_table = block_table
                return True
            if not self._preempt_one_after(entry):
                return False

    def _preempt_one_after(self, entry: Entry) -> bool:
        """Have the last to arrive give its blocks back and wait with all its tokens, to be computed again."""
        later = [
            other
            for other in self.book.holders.values()
            if other.number > entry.number and other.state is not State.RUNNING
        ]
        if not later:
            return False
        self.book.take_blocks(max(later, key=lambda other: other.number))
        self.book.num_preemptions += 1
        return True

    def _publish(self, entry: Entry) -> None:
        if entry.request.num_encoder_tokens:
            return
        extend_digests(entry.digests, entry.token_ids, self._block_tables.block_size, root=_root_of(entry))
        self._block_tables.publish(
            entry.request.request_id, entry.digests, num_computed_tokens=entry.num_computed_tokens
        )


def _root_of(entry: Entry) -> bytes:
    """What keys and values depend on beside the tokens: an adapter's weights."""
    return (entry.request.adapter or "").encode()
