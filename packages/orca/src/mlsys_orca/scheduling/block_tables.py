"""Ownership of K/V blocks: the scheduler's half of the K/V cache, pure bookkeeping.

Two ways to give a request its blocks. :meth:`BlockTables.reserve` takes all that it may ever need at once (ORCA,
section 4.2: reserving ``max_tokens`` slots at the first iteration rules out deadlock). :meth:`BlockTables.allocate` and
:meth:`BlockTables.grow` take what the tokens there are need now, and share blocks whose contents are known already.
Either way :meth:`BlockTables.free` takes them back exactly once. The tensors are the runner's
(:class:`mlsys_orca.model.kv_cache.KVCache`); block ids cross with each batch.

A recurrent model has a state of each request beside them, in a slot that comes and goes with the blocks. A state
follows all tokens before it, which blocks cannot tell: so nothing is shared, and a preempted request begins anew.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlsys_core.errors import InvalidInputError, MemoryPlanError
from mlsys_core.memory import BlockId, BlockPool, Blocks

from mlsys_orca.scheduling.batch import BlockCopy

DEFAULT_BLOCK_SIZE = 16  # tokens


@dataclass(frozen=True, slots=True)
class Allocation:
    """The blocks a request got from :meth:`BlockTables.allocate`."""

    block_table: tuple[int, ...]  # in order of position
    num_cached_tokens: int  # keys and values that are there already; always fewer than the request's tokens
    block_copy: BlockCopy | None  # to be copied before the request's first iteration


@dataclass(slots=True)
class _Held:
    table: tuple[BlockId, ...]
    state_slot: int
    num_published: int = 0  # blocks offered to the cache, or taken from it


class PrefixCache:
    """K/V blocks by the content that they hold, for later requests that begin with the same tokens.

    Only full blocks are kept, by a digest of all tokens from the request's first to the block's last: a key and a value
    depend on every token before them. A kept block is read-only, whoever holds it.

    It holds one reference of its own to each block it keeps. A block that nobody else holds is *idle*: its content can
    be had again until the pool needs the block, the least recently used first.

    Args:
        pool: Where the blocks come from.

    Example:
        >>> from mlsys_core.memory import BlockPool
        >>> pool = BlockPool(2)
        >>> cache = PrefixCache(pool)
        >>> blocks = pool.allocate(1)
        >>> cache.keep(b"content", blocks[0])
        >>> cache.release(blocks)
        >>> cache.num_idle, cache.match([b"content", b"unknown"]) == blocks
        (1, True)
    """

    def __init__(self, pool: Blocks) -> None:
        self._pool = pool
        self._blocks: dict[bytes, BlockId] = {}
        self._digests: dict[BlockId, bytes] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()  # least recently used first
        self.changes: dict[int, bytes | None] | None = None  # by block: kept since, or not any more; None: not noted

    @property
    def num_idle(self) -> int:
        """Blocks that only the cache holds."""
        return len(self._idle)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._digests

    def match(self, digests: Sequence[bytes]) -> list[BlockId]:
        """Return the blocks with the longest known beginning of ``digests``; :meth:`hold` them before anything else."""
        blocks = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def keep(self, digest: bytes, block: BlockId) -> None:
        """Keep ``block``, whose content ``digest`` names; nothing happens if another block has that content."""
        if digest not in self._blocks:
            self._pool.retain([block])
            self._blocks[digest] = block
            self._digests[block] = digest
            if self.changes is not None:
                self.changes[block] = digest

    def hold(self, blocks: Sequence[BlockId]) -> None:
        """Add a request's reference to each of ``blocks``."""
        self._pool.retain(blocks)
        for block in blocks:
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop a request's reference to each of ``blocks``; of those that fall idle the first is evicted first."""
        self._pool.release(blocks)
        for block in blocks:
            if block in self._digests and self._pool.ref_count(block) == 1:
                self._idle[block] = None

    def evict(self, num_blocks: int) -> None:
        """Give the pool ``num_blocks`` idle blocks back."""
        for _ in range(num_blocks):
            self._forget(self._idle.popitem(last=False)[0])

    def clear(self) -> None:
        """Forget all contents; blocks that requests hold stay theirs."""
        self._idle.clear()
        for block in list(self._digests):
            self._forget(block)

    def _forget(self, block: BlockId) -> None:
        del self._blocks[self._digests.pop(block)]
        if self.changes is not None:
            self.changes[block] = None
        self._pool.release([block])


class BlockTables:
    """K/V blocks by the request that holds them. One owner: the scheduler.

    Args:
        num_blocks: Blocks there are.
        block_size: Tokens per block.
        num_states: Slots for states of requests; None: the model has none, and any number of requests fits.
        new_pool: Makes the memory pool, from the number of blocks.

    Example:
        >>> tables = BlockTables(num_blocks=4, block_size=16)
        >>> tables.reserve("a", num_tokens=40)
        (0, 1, 2)
        >>> tables.can_reserve(17)
        False
        >>> tables.free("a")
        >>> tables.num_free_blocks
        4
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        num_states: int | None = None,
        new_pool: Callable[[int], Blocks] = BlockPool,
    ) -> None:
        if block_size < 1:
            raise InvalidInputError(f"blocks of {block_size} tokens hold nothing; the size must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pool = new_pool(num_blocks)
        self._cache = PrefixCache(self._pool)
        self._held: dict[str, _Held] = {}
        self._free_states = None if num_states is None else list(range(num_states))[::-1]

    @property
    def num_free_blocks(self) -> int:
        """Blocks no request holds, whether their contents are kept or not."""
        return self._pool.num_free + self._cache.num_idle

    @property
    def num_cached_blocks(self) -> int:
        """Number of free blocks with contents that a request could share."""
        return self._cache.num_idle

    def num_holders(self, block: int) -> int:
        """Return the number of requests that hold ``block``."""
        return self._pool.ref_count(BlockId(block)) - (BlockId(block) in self._cache)

    def is_read_only(self, block: int) -> bool:
        """Return whether ``block`` has contents that others share or may come to share."""
        return BlockId(block) in self._cache

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def can_reserve(self, num_tokens: int) -> bool:
        """Return whether :meth:`reserve` would succeed now."""
        return self._has_state() and self.num_blocks_for(num_tokens) <= self.num_free_blocks

    def reserve(self, request_id: str, num_tokens: int) -> tuple[int, ...]:
        """Give a request blocks for ``num_tokens`` tokens: its prompt and all it may generate.

        In rising order, so that tables are runs of adjacent blocks while the cache is not crowded; a run is read as a
        view, other tables are gathered.

        Raises:
            InvalidInputError: ``num_tokens`` is less than 1.
            MemoryPlanError: the request has blocks already, or too few are free (ask :meth:`can_reserve` first).
        """
        self._check_new(request_id, num_tokens)
        table = self._take_blocks(self.num_blocks_for(num_tokens))
        self._held[request_id] = _Held(table, self._take_state())
        return table

    def allocate(
        self, request_id: str, num_tokens: int, digests: Sequence[bytes] = (), *, keep_free: int = 0
    ) -> Allocation | None:
        """Give a request blocks for the ``num_tokens`` tokens it has, shared as far as their contents are kept.

        The last token is never taken from the cache, since its logits are wanted. Where its block is, the request gets
        a copy to write into (copy on write).

        Args:
            request_id: Owner of the tokens.
            num_tokens: Tokens to hold.
            digests: The request's full blocks' (:func:`~mlsys_orca.scheduling.pager.extend_digests`); empty:
                share none.
            keep_free: Blocks that must stay free.

        Returns:
            The blocks; None, and nothing is changed, if too few are free.

        Raises:
            InvalidInputError: ``num_tokens`` is less than 1.
            MemoryPlanError: the request has blocks already.

        Example:
            >>> tables, digests = BlockTables(num_blocks=4, block_size=2), [b"first block's tokens"]
            >>> tables.allocate("a", 3, digests).block_table
            (0, 1)
            >>> tables.publish("a", digests, num_computed_tokens=3)
            >>> tables.allocate("b", 4, digests)
            Allocation(block_table=(0, 2), num_cached_tokens=2, block_copy=None)
            >>> tables.allocate("c", 2, digests)
            Allocation(block_table=(3,), num_cached_tokens=1, block_copy=(0, 3))
        """
        self._check_new(request_id, num_tokens)
        if not self._has_state():
            return None
        cached = self._cache.match(digests[: num_tokens // self.block_size])
        num_cached_tokens = min(len(cached) * self.block_size, num_tokens - 1)
        num_shared = num_cached_tokens // self.block_size
        num_new = self.num_blocks_for(num_tokens) - num_shared
        self._cache.hold(cached)  # first: the allocation below must not evict them
        if num_new + keep_free > self.num_free_blocks:
            self._cache.release(cached[::-1])
            return None
        new = self._take_blocks(num_new)
        block_copy = None
        if num_shared < len(cached):
            block_copy = cached[-1], new[0]
            # Free to be evicted at once: whoever writes to it next does so after the copy, in this batch or a later.
            self._cache.release(cached[-1:])
        table = (*cached[:num_shared], *new)
        self._held[request_id] = _Held(table, self._take_state(), len(cached))
        return Allocation(table, num_cached_tokens, block_copy)

    def grow(self, request_id: str, num_tokens: int) -> tuple[int, ...] | None:
        """Grow the request's table to ``num_tokens`` tokens and return it; None, and no change, if too few are free.

        Raises:
            MemoryPlanError: the request has no blocks.
        """
        held = self._of(request_id)
        num_new = self.num_blocks_for(num_tokens) - len(held.table)
        if num_new > 0:
            if num_new > self.num_free_blocks:
                return None
            held.table = (*held.table, *self._take_blocks(num_new))
        return held.table

    def publish(self, request_id: str, digests: Sequence[bytes], *, num_computed_tokens: int) -> None:
        """Let others share the request's blocks that are full of computed keys and values; it must not write to them.

        Args:
            request_id: Owner of the blocks.
            digests: Digests of all its full blocks at least.
            num_computed_tokens: Tokens whose keys and values are in the blocks.

        Raises:
            MemoryPlanError: the request has no blocks.
        """
        held = self._of(request_id)
        if self._free_states is not None:
            return
        for index in range(held.num_published, num_computed_tokens // self.block_size):
            self._cache.keep(digests[index], held.table[index])
            held.num_published = index + 1

    def note_cache_changes(self) -> None:
        """Note from now on which blocks' contents are kept, for :meth:`take_cache_changes`."""
        self._cache.changes = {}

    def take_cache_changes(self) -> dict[int, bytes | None]:
        """Return by block the digests kept since the last call; None: contents that are not kept any more."""
        changes = self._cache.changes
        if not changes:
            return {}
        self._cache.changes = {}
        return changes

    def restore(self, tables: Mapping[str, Sequence[int]], kept: Mapping[int, bytes] | None = None) -> None:
        """Give requests the blocks that they held in other tables over the same memory; call it first of all.

        Args:
            tables: Blocks by request, in order of position; requests may share some.
            kept: Digests by block, of contents that those tables kept.

        Raises:
            MemoryPlanError: a block is in use here already.
        """
        holders = Counter(block for table in tables.values() for block in table)
        everything = self._pool.allocate(self.num_blocks)
        for block, number in holders.items():
            self._pool.retain([BlockId(block)] * (number - 1))
        digests = {BlockId(block): digest for block, digest in (kept or {}).items()}
        for block, digest in digests.items():
            self._cache.keep(digest, block)
        free = [block for block in everything[::-1] if block not in holders and block not in self._cache]
        idle = [block for block in reversed(digests) if block not in holders]  # prompts' ends before beginnings
        self._cache.release([*free, *idle])
        for request_id, table in tables.items():
            self._held[request_id] = _Held(tuple(BlockId(block) for block in table), self._take_state())

    def free(self, request_id: str) -> None:
        """Take a request's blocks back; published ones keep their contents until the space is needed.

        Raises:
            MemoryPlanError: the request has none: never reserved, or freed before.
        """
        # Last block first: the pool hands out what came back last, so the next table is a rising run again; and of
        # kept contents the ends are evicted first, without which a beginning is still of use, but not the reverse.
        held = self._of(request_id)
        self._cache.release(held.table[::-1])
        if self._free_states is not None:
            self._free_states.append(held.state_slot)
        del self._held[request_id]

    def state_slot(self, request_id: str) -> int:
        """Return the slot of the request's state; 0 where the model has none.

        Raises:
            MemoryPlanError: the request has no blocks.
        """
        return self._of(request_id).state_slot

    def clear_cache(self) -> None:
        """Forget all contents that are kept; blocks that requests hold stay theirs."""
        self._cache.clear()

    def _has_state(self) -> bool:
        return self._free_states is None or bool(self._free_states)

    def _take_state(self) -> int:
        if self._free_states is None:
            return 0
        if not self._free_states:
            raise MemoryPlanError("no state slot is free: ask can_reserve first")
        return self._free_states.pop()

    def _take_blocks(self, num_blocks: int) -> tuple[BlockId, ...]:
        missing = num_blocks - self._pool.num_free
        if 0 < missing <= self._cache.num_idle:
            self._cache.evict(missing)
        return tuple(sorted(self._pool.allocate(num_blocks)))

    def _check_new(self, request_id: str, num_tokens: int) -> None:
        if request_id in self._held:
            raise MemoryPlanError(f"request {request_id!r} has its K/V blocks already; free them first")
        if num_tokens < 1:
            raise InvalidInputError(f"request {request_id!r} reserves {num_tokens} tokens; it must be at least 1")

    def _of(self, request_id: str) -> _Held:
        held = self._held.get(request_id)
        if held is None:
            raise MemoryPlanError(
                f"request {request_id!r} has no K/V blocks: it never got any, or they were freed before"
            )
        return held
