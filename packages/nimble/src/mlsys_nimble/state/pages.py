"""Bookkeeping of guarded pages: since when the system reports writes to them, and whom a write concerns (ADR 15).

A report is a suspicion: who holds the range then compares its bytes. The decisions are made here, with neither torch
nor the system's calls; :mod:`mlsys_nimble.state.guard` makes those.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Protocol

Range = tuple[int, int]  # addresses: the first, and the one behind the last
Piece = tuple[int, int]  # address and bytes


def whole_pages(
    pieces: Iterable[Piece], private: Sequence[Range], *, page_nbytes: int, least_nbytes: int
) -> list[Range]:
    """Return the ranges of whole pages within pieces of memory, in order, each page once.

    Args:
        pieces: Memory of tensors.
        private: Ranges that nothing but this process can write to, in order and apart. Others are left out.
        page_nbytes: Bytes of a page.
        least_nbytes: Bytes of a piece that is worth it.

    Example:
        >>> whole_pages([(4090, 20_000)], [(0, 1 << 20)], page_nbytes=4096, least_nbytes=8192)
        [(4096, 20480)]
    """
    found: list[Range] = []
    for address, nbytes in sorted(pieces):
        begin, end = -(-address // page_nbytes) * page_nbytes, (address + nbytes) // page_nbytes * page_nbytes
        if nbytes < least_nbytes or begin >= end or without((begin, end), private):
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def without(whole: Range, taken: Iterable[Range]) -> list[Range]:
    """Return the parts of a range that lie in none of others.

    Args:
        whole: The range.
        taken: The others, in order.

    Example:
        >>> without((0, 10), [(2, 4), (3, 5), (9, 20)])
        [(0, 2), (5, 9)]
    """
    at, end = whole
    found: list[Range] = []
    for first, last in taken:
        if last <= at or first >= end:
            continue
        if at < first:
            found.append((at, first))
        at = max(at, last)
    return [*found, (at, end)] if at < end else found


def pieces_without(pieces: Iterable[Piece], taken: Sequence[Range]) -> list[Piece]:
    """Return the parts of pieces that lie in none of some ranges, which are in order.

    Example:
        >>> pieces_without([(10, 100)], [(20, 60)])
        [(10, 10), (60, 50)]
    """
    parts = (part for address, nbytes in pieces for part in without((address, address + nbytes), taken))
    return [(begin, end - begin) for begin, end in parts]


# Seconds for which bytes are compared after a write, and again after pages are guarded. Input that a device had begun
# to write to memory before, of which no page fault tells, has arrived when they end.
SETTLE_S = 1.0
MAX_SPANS = 8_192  # of a process, each of which may take two of the 65,530 mappings that Linux allows
_BUCKET = 21  # bits of an address: spans are looked up by the 2 MiB in which they lie


class State(IntEnum):
    """State of a range, as ``pages.h`` has it."""

    UNWRITTEN = 0
    WRITTEN = 1
    LOST = 2  # the system does not guard it, or no longer


class Guard(Protocol):
    """System that reports which ranges of pages were written since they were armed."""

    def is_own(self) -> bool:
        """Return whether it tells of this process; False in a forked one."""
        ...

    def target(self, ranges: Sequence[Range]) -> Any:
        """Return ranges in the form in which :meth:`scan` takes them."""
        ...

    def scan(self, target: Any) -> Sequence[int] | None:
        """Return the state of each range; None if all are unwritten."""
        ...

    def arm(self, begin: int, end: int) -> bool:
        """Report writes from now on; return whether that is possible."""
        ...

    def disarm(self, begin: int, end: int) -> None:
        """Report no more; memory that is there no longer is no error."""
        ...


class Span:
    """Range of whole pages, shared by all who hold it."""

    __slots__ = ("generation", "is_armed", "num_holds", "range", "since")

    def __init__(self, range_: Range) -> None:
        self.range = range_
        self.generation = 0  # rises with every suspicion
        self.is_armed = False
        self.since = 0.0  # seconds of the clock: when it was armed, or found to be written
        self.num_holds = 0


class Hold:
    """Ranges that somebody watches. When it is gone, so is the guard of what nobody else holds."""

    def __init__(self, spans: Sequence[Span], target: Any) -> None:
        self.spans = spans
        self.ranges = [span.range for span in spans]
        self.is_lost = False  # the system does not guard all of them any more
        self.target = target
        self.known: tuple[int, int | None] = (-1, None)  # the book's version, and the answer that it had

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in all ranges."""
        return sum(end - begin for begin, end in self.ranges)


class PageBook:
    """Book of all guarded ranges of a process.

    There must be one for a process: who arms a page takes away the report of it from everybody else.

    Args:
        guard: The system.
        clock: Seconds that only rise.
    """

    def __init__(self, guard: Guard, clock: Callable[[], float]) -> None:
        self.guard = guard
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: dict[Range, Span] = {}
        self._buckets: defaultdict[int, dict[Range, Span]] = defaultdict(dict)
        self._version = 0  # rises with any change of a span
        self._dropped: deque[Sequence[Span]] = deque()  # by finalizers, which may run while the lock is held

    def hold(self, ranges: Sequence[Range]) -> Hold | None:
        """Guard ranges, and return those for which that was possible; None if there is none.

        Bytes must be read after this: a write before it is not reported.
        """
        with self._lock:
            self._forget_dropped()
            if len(self._spans) + len(ranges) > MAX_SPANS:
                return None
            now = self._clock()
            spans = []
            for each in ranges:
                span = self._spans.get(each) or self._add(each)
                if self._arm(span, now):
                    span.num_holds += 1
                    spans.append(span)
                elif not span.num_holds:
                    self._remove(span)
            if not spans:
                return None
        found = Hold(spans, self.guard.target([span.range for span in spans]))
        weakref.finalize(found, self._drop, spans).atexit = False
        return found

    def look(self, hold: Hold) -> int | None:
        """Return a number that is the same as long as no range may have been written; None: compare the bytes.

        A number that was not there before asks for a comparison too, one that begins after this call. If that finds the
        bytes unchanged, they are as long as the number comes again.
        """
        found = self.guard.scan(hold.target)
        version, answer = hold.known
        if found is None and version == self._version:  # read after the scan: who arms raises it first
            return answer
        with self._lock:
            now = self._clock()
            for span, state in zip(hold.spans, found or (), strict=False):
                hold.is_lost |= state == State.LOST
                if state != State.UNWRITTEN and span.is_armed:
                    span.is_armed, span.since = False, now
                    self._suspect(span)
            for span in hold.spans:
                if not span.is_armed and not hold.is_lost and now - span.since >= SETTLE_S:
                    hold.is_lost |= not self._arm(span, now)
            if all(span.is_armed and now - span.since >= SETTLE_S for span in hold.spans):
                hold.known = self._version, sum(span.generation for span in hold.spans)
                return hold.known[1]
            return None

    def _suspect(self, span: Span) -> None:
        span.generation += 1
        self._version += 1

    def _arm(self, span: Span, now: float) -> bool:
        """Guard a span. That ends the report of earlier writes to its pages, so all who share one suspect them."""
        for other in (span, *self._overlapping(span.range)):
            self._suspect(other)
            other.since = now
        span.is_armed = self.guard.arm(*span.range)
        return span.is_armed

    def _add(self, range_: Range) -> Span:
        span = self._spans[range_] = Span(range_)
        for bucket in _buckets(range_):
            self._buckets[bucket][range_] = span
        return span

    def _remove(self, span: Span) -> None:
        del self._spans[span.range]
        for bucket in _buckets(span.range):
            del self._buckets[bucket][span.range]
            if not self._buckets[bucket]:
                del self._buckets[bucket]
        others = sorted(other.range for other in self._overlapping(span.range))
        for begin, end in without(span.range, others):
            self.guard.disarm(begin, end)

    def _overlapping(self, range_: Range) -> Iterator[Span]:
        """Yield the other spans that share a page."""
        found = {each: span for bucket in _buckets(range_) for each, span in self._buckets.get(bucket, {}).items()}
        begin, end = range_
        return (span for each, span in found.items() if each != range_ and each[0] < end and begin < each[1])

    def _drop(self, spans: Sequence[Span]) -> None:
        self._dropped.append(spans)
        if self._lock.acquire(blocking=False):
            try:
                self._forget_dropped()
            finally:
                self._lock.release()

    def _forget_dropped(self) -> None:
        while self._dropped and self.guard.is_own():
            for span in self._dropped.popleft():
                span.num_holds -= 1
                if not span.num_holds:
                    self._remove(span)


def _buckets(range_: Range) -> Iterable[int]:
    return range(range_[0] >> _BUCKET, ((range_[1] - 1) >> _BUCKET) + 1)
