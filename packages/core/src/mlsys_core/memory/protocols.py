"""The two kinds of memory pools: single blocks, and runs of adjacent rows. Plugins add others by these protocols.

A pool deals in numbers and knows no tensor; one scheduler owns it and is its only caller, so it needs no lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlsys_core.memory.block_pool import BlockId


class Blocks(Protocol):
    """A pool of equal blocks, each free or held by one or more references; Orca's K/V cache is cut into them."""

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now."""
        ...

    def ref_count(self, block: BlockId) -> int:
        """Return the references to ``block``; 0 if it is free."""
        ...

    def allocate(self, n: int) -> list[BlockId]:
        """Take ``n`` free blocks, with one reference each: all of them or none.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        ...

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """Add one reference to each of ``blocks``."""
        ...

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each of ``blocks``; those with none left are free."""
        ...


class Runs(Protocol):
    """A pool of numbers handed out in runs of adjacent ones, such as BatchMaker's state rows."""

    def fits(self, count: int) -> bool:
        """Return whether ``count`` adjacent numbers would be available if all were free."""
        ...

    def take(self, count: int) -> int | None:
        """Return the first of ``count`` adjacent numbers; None if there is no room now. A count of 0 takes nothing."""
        ...

    def give_back(self, start: int, count: int) -> None:
        """Return a run that :meth:`take` gave for ``count``."""
        ...
