"""K/V blocks on demand for the policies that do not reserve: admission, growth and preemption, in order of arrival.

One rule keeps such a policy free of deadlock and starvation: whoever needs blocks that are not free takes them from
the request that arrived last, if that is after its own arrival and not in flight. So the earliest request can always
get what it needs, at the latest when the batches in flight are back, and every request is the earliest at some time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

from mlsys_core.errors import InvalidInputError

from mlsys_orca.scheduling.batch import BatchBuilder
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.request_pool import RequestPool, SequenceState, State

_DIGEST_NBYTES = 32  # who could make two prompts collide would read another's answer: as wide as that needs


def extend_digests(
    digests: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    *,
    root: bytes = b"",
) -> None:
    """Append to ``digests`` those of the full blocks of ``token_ids`` that it does not have yet: a hash chain.

    ``root`` begins the chain: whatever else keys and values depend on.

    Example:
        >>> first, second = [], []
        >>> extend_digests(first, [1, 2, 3, 4, 5], 2)
        >>> extend_digests(second, [1, 2, 9, 4], 2)
        >>> len(first), first[0] == second[0], first[1] == second[1]
        (2, True, False)
    """
    for index in range(len(digests), len(token_ids) // block_size):
        tokens = array("q", token_ids[index * block_size : (index + 1) * block_size])
        parent = digests[-1] if digests else root
        digests.append(blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_NBYTES).digest())


def root_of(adapter: str | None) -> bytes:
    """Return the root of a request's digests: its adapter's name, as keys and values depend on its weights too."""
    return (adapter or "").encode()


class Pager:
    """Allocator of K/V blocks to the requests of its pool.

    Args:
        block_tables: The K/V blocks.
        max_batch_size: The pool's.
        max_model_len: The pool's.
        watermark: Share of the blocks, below 1, that stays free when a request is admitted, so that those running can
            grow for a while; without others that hold blocks it does not apply.
        prefix_caching: Let requests share blocks with the same contents. Those with an encoder never do: what it
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
        self.pool = RequestPool(
            block_tables,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            on_computed=self._publish if prefix_caching else None,
        )
        self._block_tables = block_tables
        self._num_kept_free = ceil(watermark * block_tables.num_blocks)
        self._prefix_caching = prefix_caching

    def provide(self, sequence: SequenceState, builder: BatchBuilder) -> bool:
        """See to it that ``sequence`` has blocks for all the tokens it has; False if it must wait for some.

        It must be put into the batch of ``builder`` then: what is in a batch is not preempted.
        """
        if sequence.state is State.PREFILL:
            return self._admit(sequence, builder)
        return self._grow(sequence)

    def _admit(self, sequence: SequenceState, builder: BatchBuilder) -> bool:
        request, digests = sequence.request, sequence.digests
        if self._prefix_caching and not request.num_encoder_tokens:
            self._extend(sequence)
        if request.sampling.num_prompt_logprobs is not None:
            digests = []  # what is not computed has no logits
        while True:
            allocation = self._block_tables.allocate(
                sequence.request.request_id,
                len(sequence.token_ids),
                digests,
                keep_free=self._num_kept_free if self.pool.holders and self.pool.alone is None else 0,
            )
            if allocation is not None:
                break
            if not self._preempt_one_after(sequence):
                return False
        self.pool.give_blocks(sequence, allocation.block_table)
        sequence.num_computed_tokens = allocation.num_cached_tokens
        self.pool.num_cached_tokens += allocation.num_cached_tokens
        if not sequence.tokens:  # else it was preempted, and what it found is its own
            sequence.num_cached_tokens = allocation.num_cached_tokens
        if allocation.block_copy is not None:
            builder.copy_block(*allocation.block_copy)
        return True

    def _grow(self, sequence: SequenceState) -> bool:
        num_tokens = len(sequence.token_ids)
        while True:
            block_table = self._block_tables.grow(sequence.request.request_id, num_tokens)
            if block_table is not None:
                sequence.block_table = block_table
                return True
            if not self._preempt_one_after(sequence):
                return False

    def _preempt_one_after(self, sequence: SequenceState) -> bool:
        """Have the last to arrive give its blocks back and wait; False: none is left to do so."""
        if self.pool.alone is not None:
            return self.pool.preempt_held()
        later = [
            other
            for other in self.pool.holders.values()
            if other.number > sequence.number and other.state is not State.RUNNING
        ]
        if not later:
            return False
        self.pool.preempt(max(later, key=lambda other: other.number))
        return True

    def _publish(self, sequence: SequenceState) -> None:
        if sequence.request.num_encoder_tokens:
            return
        self._extend(sequence)
        self._block_tables.publish(
            sequence.request.request_id, sequence.digests, num_computed_tokens=sequence.num_computed_tokens
        )

    def _extend(self, sequence: SequenceState) -> None:
        """Note the digests of the request's full blocks."""
        request, block_size = sequence.request, self._block_tables.block_size
        root = root_of(request.adapter)
        extend_digests(sequence.digests, sequence.token_ids, block_size, root=root)
