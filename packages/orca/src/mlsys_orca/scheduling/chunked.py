"""Iteration-level scheduling under a budget of tokens: prompts run in chunks, beside the decodes of others.

A whole prompt in one iteration has every other request of that iteration wait for it. Here an iteration has at most
``max_batch_tokens`` tokens: first the decodes, one token each, then as much of the prompts, by arrival, as is left, but
no more than ``max_chunk_tokens`` where requests decode, who wait for it: where none does, a prompt takes all. A token
that is far into its prompt attends to all before it, so the further a prompt has come, the smaller its chunks are.
The last chunk of a prompt gives the first token. Blocks are had as in :mod:`mlsys_orca.scheduling.paged`, those of a
prompt all at once, so a prompt never strands between two chunks. What an encoder reads is one chunk.
"""

from __future__ import annotations

from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import WorkerId

from mlsys_orca.scheduling.batch import BatchBuilder, GenerationRequest, IterationBatch
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.paged import DEFAULT_WATERMARK
from mlsys_orca.scheduling.pager import Pager
from mlsys_orca.scheduling.request_pool import State

DEFAULT_BATCH_TOKENS = 512  # a prefill of this length keeps the linear layers at their peak; more only adds latency
_TWICE_AS_DEAR_AT = 4096  # tokens into a prompt, about: where a token's attention costs as much as all other operators


class ChunkedScheduler:
    """Decodes first, then prefill chunks, under a budget of tokens; blocks on demand.

    Args:
        block_tables: The workers' K/V blocks; the scheduler is their only owner.
        max_batch_size: Requests per iteration at most.
        max_model_len: Tokens a request may have in all, prompt and answer.
        max_batch_tokens: Tokens per iteration at most.
        max_chunk_tokens: Tokens of prompts in an iteration in which requests decode, at most; one that is 4,096 tokens
            into its prompt counts twice. None: all that is left. An encoder's prompt is one chunk of any length.
        watermark: Share of the blocks that stays free when a request is admitted, for those running to grow.
        prefix_caching: Let requests share blocks with the same contents.

    Raises:
        InvalidInputError: a limit is too low to serve anything, or ``watermark`` is not from 0 to below 1.

    Example:
        >>> from mlsys_orca.scheduling.batch import GenerationRequest
        >>> tables = BlockTables(num_blocks=8, block_size=4)
        >>> scheduler = ChunkedScheduler(tables, max_batch_size=2, max_model_len=32, max_batch_tokens=2)
        >>> scheduler.add(GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), max_new_tokens=2), now=0.0)
        >>> batch = scheduler.next_batch(WorkerId(0), now=0.0)
        >>> batch.token_ids, batch.sampled
        ((5, 6), ())
    """

    restores_blocks = True  # goes on with requests whose K/V blocks another engine has filled

    def __init__(
        self,
        block_tables: BlockTables,
        *,
        max_batch_size: int,
        max_model_len: int,
        max_batch_tokens: int = DEFAULT_BATCH_TOKENS,
        max_chunk_tokens: int | None = None,
        watermark: float = DEFAULT_WATERMARK,
        prefix_caching: bool = True,
    ) -> None:
        if max_batch_tokens < 1:
            raise InvalidInputError(f"max_batch_tokens is {max_batch_tokens}; it must be at least 1")
        if max_chunk_tokens is not None and max_chunk_tokens < 1:
            raise InvalidInputError(f"max_chunk_tokens is {max_chunk_tokens}; it must be at least 1, or None")
        self._max_batch_tokens = max_batch_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._pager = Pager(
            block_tables,
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            watermark=watermark,
            prefix_caching=prefix_caching,
        )
        self.pool = pool = self._pager.pool
        self.cancel, self.wake_at = pool.cancel, pool.wake_at
        self.complete, self.fail = pool.complete, pool.fail

    @property
    def num_unfinished(self) -> int:
        """Requests admitted that have not left."""
        return self.pool.num_unfinished

    def add(self, request: GenerationRequest, now: float) -> None:
        """Admit ``request``.

        Raises:
            InvalidInputError: as the pool's, or an iteration has no room for what an encoder must read at once.
        """
        if request.num_encoder_tokens >= self._max_batch_tokens:
            raise InvalidInputError(
                f"an encoder reads {request.num_encoder_tokens} tokens of this request at once, and a decoder begins "
                f"beside them, where this server has at most {self._max_batch_tokens} tokens in an iteration: shorten "
                "the prompt, or raise max_batch_tokens"
            )
        self.pool.add(request, now)

    def next_batch(self, worker: WorkerId, now: float) -> IterationBatch | None:
        """Return the decodes by arrival, then prompt chunks by arrival, each to the first that finds no blocks."""
        builder = BatchBuilder()
        num_selected = self._add_decodes(builder)
        num_selected += self._add_chunks(builder, num_selected)
        return builder.build() if num_selected else None

    def _add_decodes(self, builder: BatchBuilder) -> int:
        room = min(self.pool.max_batch_size, self._max_batch_tokens)
        num_selected = 0
        # Preempting changes the holders, never those before the one that needs blocks: hence the copy, by arrival.
        for sequence in sorted(self.pool.holders.values(), key=lambda holder: holder.number):
            if num_selected == room:
                break
            if sequence.state is not State.DECODE or sequence.num_uncomputed_tokens > 1:
                continue
            if not self.pool.may_run(sequence):
                continue
            if not self._pager.provide(sequence, builder):
                break
            self.pool.append(builder, sequence)
            num_selected += 1
        return num_selected

    def _add_chunks(self, builder: BatchBuilder, num_decodes: int) -> int:
        budget = self._max_batch_tokens - builder.num_tokens  # guesses behind the decodes count: it may be negative
        bounded = bool(num_decodes) and self._max_chunk_tokens is not None
        cost = (self._max_chunk_tokens or 0) * _TWICE_AS_DEAR_AT  # that is left, of tokens where decodes wait
        room = self.pool.max_batch_size - num_decodes
        num_selected = 0
        for sequence in self.pool.sequences.values():
            if num_selected == room:
                break
            if not self.pool.may_run(sequence):
                continue
            if sequence.state is State.DECODE and sequence.num_uncomputed_tokens == 1:
                break  # a decode that found no block: nobody later finds one
            left, price = budget, _TWICE_AS_DEAR_AT + sequence.num_computed_tokens
            if bounded and sequence.num_joined_tokens == 1:
                left = min(budget, max(cost // price, 0 if num_selected else 1))
            if sequence.num_joined_tokens > left or not self._pager.provide(sequence, builder):
                break
            num_tokens = min(sequence.num_uncomputed_tokens, left)
            self.pool.append(builder, sequence, num_tokens)
            budget -= num_tokens
            cost -= num_tokens * price
            num_selected += 1
        return num_selected
