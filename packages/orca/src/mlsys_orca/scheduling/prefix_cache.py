"""Contents of K/V blocks that outlive their request, for later requests that begin with the same tokens.

Below :class:`~mlsys_orca.scheduling.block_tables.BlockTables`, which asks it before it gives a request new blocks.
Only full blocks are kept, by a digest of all tokens from the request's first to the block's last: a key and a value
depend on every token before them. A kept block is read-only, whoever holds it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from mlsys_core.memory import BlockId, Blocks

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


class PrefixCache:
    """K/V blocks by the content that they hold.

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
