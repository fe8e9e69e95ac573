"""Fixed blocks with reference counts, for a cache of equal pieces.

The pool deals in block ids only; the tensors that the ids index (Orca's key/value cache) belong to whoever runs the
model. A scheduler is its one caller and calls it in every iteration, so each operation costs as much as the blocks it
touches and no more. It has no lock: one thread owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NewType, NoReturn, Self

from mlsys_core.errors import InvalidInputError, MemoryPlanError

BlockId = NewType("BlockId", int)

MAX_NAMED = 16  # block ids an error message spells out


class OutOfBlocksError(MemoryPlanError):
    """A pool has fewer free blocks than were asked for; nothing was allocated."""

    def __init__(self, wanted: int, free: int, num_blocks: int) -> None:
        super().__init__(
            f"{wanted} blocks wanted, {free} of {num_blocks} are free: release some (finish or preempt a request) "
            f"or make the pool larger"
        )
        self.wanted = wanted
        self.free = free


class BlockPool:
    """``num_blocks`` blocks, each free or held by one or more references.

    Blocks are handed out last released, first reused: such a block is likely to be in a cache still.

    Args:
        num_blocks: blocks in the pool, 1 or more; their ids are ``0 .. num_blocks - 1``.

    Raises:
        InvalidInputError: ``num_blocks`` is less than 1.

    Example:
        >>> pool = BlockPool(4)
        >>> prompt = pool.allocate(2)
        >>> pool.retain(prompt)  # a second sequence shares the prompt's blocks
        >>> pool.release(prompt)
        >>> pool.num_free
        2
        >>> pool.release(prompt)
        >>> pool.close()  # nothing is held: no leak
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidInputError(f"num_blocks is {num_blocks}: a pool needs at least 1 block")
        self._num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]  # a stack; its top is next
        self._closed = False

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, free or not."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def ref_count(self, block: BlockId) -> int:
        """Return the references to ``block``; 0 if it is free.

        Raises:
            MemoryPlanError: ``block`` is not of this pool.
        """
        if not 0 <= block < self._num_blocks:
            self._refuse(block, "looked up")
        return self._ref_counts[block]

    def allocate(self, n: int) -> list[BlockId]:
        """Take ``n`` free blocks, with one reference each: all of them or none.

        Raises:
            OutOfBlocksError: fewer than ``n`` are free; it has the numbers as ``wanted`` and ``free``.
            InvalidInputError: ``n`` is negative.
            MemoryPlanError: the pool is closed.
        """
        free = self._free
        if n == 1 and free:  # a decode step adds one block to a sequence
            block = free.pop()
            self._ref_counts[block] = 1
            return [block]
        if n < 0:
            raise InvalidInputError(f"{n} blocks wanted: ask for 0 or more")
        if self._closed:
            raise MemoryPlanError("this block pool is closed: allocate from it before close(), or make a new one")
        if n > len(free):
            raise OutOfBlocksError(n, len(free), self._num_blocks)
        blocks = free[: -n - 1 : -1]
        del free[len(free) - n :]
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """Add one reference to each of ``blocks``; a block named twice gets two. All of them or none.

        Raises:
            MemoryPlanError: a block is free, or not of this pool.
        """
        ref_counts, num_blocks = self._ref_counts, self._num_blocks
        for block in blocks:
            if not 0 <= block < num_blocks or not ref_counts[block]:
                self._refuse(block, "retained")
        for block in blocks:
            ref_counts[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each of ``blocks``; those with none left are free. All of them or none.

        Raises:
            MemoryPlanError: a block is free already (a double free), or not of this pool.
        """
        ref_counts, num_blocks, free = self._ref_counts, self._num_blocks, self._free
        num_free = len(free)
        for done, block in enumerate(blocks):
            if not 0 <= block < num_blocks or not ref_counts[block]:
                for earlier in blocks[:done]:
                    ref_counts[earlier] += 1
                del free[num_free:]
                self._refuse(block, "released")
            count = ref_counts[block] - 1
            ref_counts[block] = count
            if not count:
                free.append(block)

    def close(self) -> None:
        """Check that nothing is held and close the pool; idempotent. On a leak the pool stays open, to be examined.

        Raises:
            MemoryPlanError: blocks are still held; the message lists them.
        """
        if not self._closed:
            if leaked := [block for block, count in enumerate(self._ref_counts) if count]:
                raise MemoryPlanError(f"{_named(leaked)} leaked: release each once per allocate() and retain()")
            self._closed = True
            self._free = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:  # otherwise the leak is a consequence, and would hide its cause
            self.close()

    def _refuse(self, block: BlockId, verb: str) -> NoReturn:
        if not 0 <= block < self._num_blocks:
            raise MemoryPlanError(
                f"block {block} {verb}, which is not of this pool: its ids are 0 to {self._num_blocks - 1}"
            )
        if verb == "released":
            raise MemoryPlanError(
                f"block {block} released more often than it was held (a double free): nothing changed"
            )
        raise MemoryPlanError(f"block {block} {verb} while it is free: retain only what is held; nothing changed")


def _named(blocks: Sequence[int]) -> str:
    names = ", ".join(map(str, blocks[:MAX_NAMED]))
    more = f" and {len(blocks) - MAX_NAMED} more" if len(blocks) > MAX_NAMED else ""
    return f"{len(blocks)} block{'s' if len(blocks) > 1 else ''} ({names}{more})"
