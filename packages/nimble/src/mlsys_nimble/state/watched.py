"""Comparison of tensors' bytes that leaves out pages which the system reports as not written (ADR 58)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

from mlsys_core.posix import private_memory
from mlsys_nimble.state.digest import Unchanged, pieces_of
from mlsys_nimble.state.guard import page_book
from mlsys_nimble.state.pages import Hold, PageBook
from mlsys_nimble.state.ranges import Piece, Range, pieces_without, whole_pages
from torch import Tensor

LEAST_NBYTES = 32 * 1024  # of a tensor, below which reading it is as fast as asking


class Watched:
    """Record of tensors' bytes. Pages that the system guards are read only if they may have been written.

    Where it guards none, all bytes are read at each look.

    Args:
        tensors: As for :class:`~mlsys_nimble.state.digest.Digest`.
        compare: Return a record of the present bytes of some memory.
        book: Where pages are guarded; None: nowhere.
    """

    def __init__(
        self, tensors: Sequence[Tensor], compare: Callable[[Sequence[Piece]], Unchanged], book: PageBook | None
    ) -> None:
        self._tensors = list(tensors)
        self._pieces = pieces_of(tensors)
        self._at: tuple[PageBook, Hold] | None = None
        self._known: tuple[Hold, int] | None = None  # the book's number after which all bytes were as they had been
        if book is not None:
            self._hold(book)
        self._ranges: list[Range] = self._at[1].ranges if self._at else []
        self.whole = compare(self._pieces)  # read now that writes are reported
        self._rest = compare(pieces_without(self._pieces, self._ranges)) if self._ranges else self.whole

    @property
    def nbytes(self) -> int:
        """Return how many bytes a look reads, at least."""
        return (self._rest if self._at else self.whole).nbytes

    @property
    def guarded_nbytes(self) -> int:
        """Return how many bytes the system guards."""
        return self._at[1].nbytes if self._at else 0

    @property
    def is_calm(self) -> bool:
        """Return whether the next look trusts the system, if nothing is written before."""
        return self._at is not None and self._known == (self._at[1], self._at[0].look(self._at[1]))

    def is_same(self, *, has_team: bool = False) -> bool:
        """See :class:`~mlsys_nimble.state.digest.Unchanged`."""
        if self._at is None:
            return self.whole.is_same(has_team=has_team)
        book, hold = self._at
        if not book.guard.is_own():
            self._renew()
            return self.whole.is_same(has_team=has_team)
        answer = book.look(hold)
        if answer is not None and self._known == (hold, answer):
            return self._rest.is_same(has_team=has_team)
        if hold.is_lost:
            self._at = None
        if not self.whole.is_same(has_team=has_team):
            return False
        if answer is not None:
            if any(tensor.is_pinned() for tensor in self._tensors):  # a device may write without a page fault
                self._at = None
            else:
                self._known = hold, answer
        return True

    def _hold(self, book: PageBook) -> None:
        if any(tensor.is_pinned() for tensor in self._tensors):
            return
        ranges = whole_pages(self._pieces, private_memory(), page_nbytes=mmap.PAGESIZE, least_nbytes=LEAST_NBYTES)
        hold = book.hold(ranges) if ranges else None
        self._at = (book, hold) if hold else None

    def _renew(self) -> None:
        """Guard the same ranges in a forked process; if that is impossible, compare all bytes from now on."""
        self._at = None
        book = page_book()
        if book is not None:
            self._hold(book)
        if self._at is not None and self._at[1].ranges != self._ranges:
            self._at = None
