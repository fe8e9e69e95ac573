"""No order of writes, holds, releases and looks hides a write from who holds the page."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_nimble.state import pages
from mlsys_nimble.state.pages import SETTLE_S, Hold, PageBook, Range, State, pieces_without, whole_pages, without


class Memory:
    """Memory of pages of one byte, and the system that guards them."""

    def __init__(self) -> None:
        self.content = [0] * 64
        self.guarded: set[int] = set()
        self.written: set[int] = set()
        self.refused: set[int] = set()
        self.seconds = 0.0

    def write(self, page: int, value: int) -> None:
        self.content[page] = value
        self.written.add(page)

    def remap(self, page: int) -> None:
        """Put other memory in the page's place, as munmap and mmap do."""
        self.content[page] = -self.content[page] - 1
        self.guarded.discard(page)

    def is_own(self) -> bool:
        return True

    def target(self, ranges: Sequence[Range]) -> Any:
        return list(ranges)

    def scan(self, target: Any) -> Sequence[int] | None:
        found = [self._state(range(*each)) for each in target]
        return found if any(found) else None

    def _state(self, own: range) -> int:
        if not self.guarded.issuperset(own):
            return State.LOST
        return State.WRITTEN if self.written.intersection(own) else State.UNWRITTEN

    def arm(self, begin: int, end: int) -> bool:
        if self.refused.intersection(range(begin, end)):
            return False
        self.guarded.update(range(begin, end))
        self.written.difference_update(range(begin, end))
        return True

    def disarm(self, begin: int, end: int) -> None:
        self.guarded.difference_update(range(begin, end))


class Holder:
    """Record of pages' content, which is read only where the book asks for it."""

    def __init__(self, memory: Memory, book: PageBook, ranges: Sequence[Range]) -> None:
        self.memory, self.book = memory, book
        self.hold: Hold | None = book.hold(ranges)
        self.ranges = self.hold.ranges if self.hold else []
        self.content = self.read()
        self.known: int | None = None
        self.num_trusted = 0

    def read(self) -> list[int]:
        return [self.memory.content[page] for each in self.ranges for page in range(*each)]

    def is_same(self) -> bool:
        if self.hold is None:
            return self.read() == self.content
        answer = self.book.look(self.hold)
        if answer is not None and answer == self.known:
            self.num_trusted += 1
            return True
        if self.hold.is_lost:
            self.hold = None
        is_same = self.read() == self.content
        self.known = answer if is_same else self.known
        return is_same


def make() -> tuple[Memory, PageBook]:
    memory = Memory()
    return memory, PageBook(memory, lambda: memory.seconds)


ranges = st.integers(0, 56).flatmap(lambda begin: st.tuples(st.just(begin), st.integers(begin + 1, begin + 8)))
steps = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 63), st.integers(0, 2)),
    st.tuples(st.just("write"), st.integers(0, 63), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.sampled_from([0.3, SETTLE_S, 2 * SETTLE_S])),
    st.tuples(st.just("hold"), st.lists(ranges, min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("again"), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.integers(0, 5)),
    st.tuples(st.just("remap"), st.integers(0, 63)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(steps, st.sets(st.integers(0, 5))), max_size=40))
def test_every_write_is_seen_by_all_who_hold_the_page(program: list[tuple[Any, set[int]]]):
    memory, book = make()
    holders: list[Holder] = [Holder(memory, book, [(4, 12)])]
    for (name, *arguments), looking in program:
        if name == "write":
            memory.write(*arguments)
        elif name == "wait":
            memory.seconds += arguments[0]
        elif name == "hold":
            holders.append(Holder(memory, book, arguments[0]))
        elif name == "again":
            holders.append(Holder(memory, book, holders[arguments[0] % len(holders)].ranges or [(0, 2)]))
        elif name == "drop" and len(holders) > 1:
            del holders[arguments[0] % len(holders)]
        elif name == "remap":
            memory.remap(arguments[0])
        for number, holder in enumerate(holders):
            if number in looking:
                assert holder.is_same() == (holder.read() == holder.content)
    for holder in holders:
        assert holder.is_same() == (holder.read() == holder.content)


def test_unchanged_pages_are_trusted_after_a_while_and_again_after_a_write_of_the_same():
    memory, book = make()
    holder = Holder(memory, book, [(0, 4), (8, 12)])
    for _ in range(3):
        assert holder.is_same()
    assert not holder.num_trusted
    for _ in range(2):
        memory.seconds += SETTLE_S
        num_trusted = holder.num_trusted
        assert holder.is_same()
        assert holder.num_trusted == num_trusted
        assert holder.is_same()
        assert holder.num_trusted == num_trusted + 1
        memory.write(9, 0)
        assert holder.is_same()
        memory.seconds += SETTLE_S
        assert holder.is_same()
    assert holder.hold is not None


def test_holders_of_the_same_pages_and_of_overlapping_ones_come_to_rest():
    memory, book = make()
    holders = [Holder(memory, book, ranges) for ranges in ([(0, 8)], [(0, 8)], [(4, 12)], [(6, 7), (10, 20)])]
    for _ in range(2):
        memory.write(6, 0)
        for _ in range(6):
            assert all(holder.is_same() for holder in holders)
            memory.seconds += SETTLE_S
        trusted = [holder.num_trusted for holder in holders]
        assert all(holder.is_same() for holder in holders)
        assert [holder.num_trusted for holder in holders] == [each + 1 for each in trusted]


def test_pages_are_let_go_when_nobody_holds_them():
    memory, book = make()
    first, second = Holder(memory, book, [(0, 8)]), Holder(memory, book, [(4, 12), (20, 22)])
    assert memory.guarded == {*range(12), 20, 21}
    del first
    gc.collect()
    assert memory.guarded == {*range(4, 12), 20, 21}
    third = Holder(memory, book, [(20, 22)])
    del second
    gc.collect()
    assert memory.guarded == {20, 21}
    del third
    gc.collect()
    assert not memory.guarded


def test_ranges_that_the_system_refuses_are_left_to_the_caller(monkeypatch: pytest.MonkeyPatch):
    memory, book = make()
    memory.refused = {9}
    hold = book.hold([(0, 4), (8, 12)])
    assert hold is not None
    assert hold.ranges == [(0, 4)]
    assert book.hold([(8, 12)]) is None
    assert memory.guarded == set(range(4))
    monkeypatch.setattr(pages, "MAX_SPANS", 2)
    assert book.hold([(20, 22), (24, 26)]) is None


def test_a_range_that_is_refused_when_it_is_guarded_anew_is_lost():
    memory, book = make()
    holder = Holder(memory, book, [(0, 4)])
    memory.write(1, 0)
    assert holder.is_same()
    memory.refused = {1}
    memory.seconds += SETTLE_S
    assert holder.is_same()
    assert holder.hold is None
    memory.write(1, 5)
    assert not holder.is_same()


PAGE = 8
SPACE = 400
pieces = st.lists(st.tuples(st.integers(0, SPACE), st.integers(1, 90)), max_size=6)


@st.composite
def apart(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Return ranges in order that do not touch."""
    bounds = sorted(draw(st.sets(st.integers(0, SPACE), max_size=8)))
    return list(zip(bounds[::2], bounds[1::2], strict=False))


def addresses(ranges: list[tuple[int, int]]) -> list[int]:
    return [address for begin, end in ranges for address in range(begin, end)]


@given(pieces, apart())
def test_pages_lie_within_a_piece_and_private_memory_and_none_is_left_out(
    pieces: list[tuple[int, int]], private: list[tuple[int, int]]
):
    found = whole_pages(pieces, private, page_nbytes=PAGE, least_nbytes=20)
    got, owned = addresses(found), set(addresses(private))
    assert len(got) == len(set(got))
    assert all(before[1] < after[0] for before, after in pairwise(found))
    expected = set()
    for address, nbytes in pieces:
        whole = [
            page for page in range(address, address + nbytes) if page % PAGE == 0 and page + PAGE <= address + nbytes
        ]
        own = {byte for page in whole for byte in range(page, page + PAGE)}
        if nbytes >= 20 and own <= owned:
            expected |= own
    assert set(got) == expected


@given(
    st.tuples(st.integers(0, SPACE), st.integers(1, SPACE)),
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 90))),
)
def test_what_is_left_of_a_range(whole: tuple[int, int], taken: list[tuple[int, int]]):
    ranges = sorted((begin, begin + nbytes) for begin, nbytes in taken)
    begin, nbytes = whole
    left = addresses(without((begin, begin + nbytes), ranges))
    assert left == sorted(set(range(begin, begin + nbytes)) - set(addresses(ranges)))


@given(pieces)
def test_pages_and_what_is_left_are_all_bytes(pieces: list[tuple[int, int]]):
    found = whole_pages(pieces, [(0, 1000)], page_nbytes=PAGE, least_nbytes=20)
    left = [(address, address + nbytes) for address, nbytes in pieces_without(pieces, found)]
    assert not set(addresses(left)) & set(addresses(found))
    assert set(addresses(left)) | set(addresses(found)) == {b for a, n in pieces for b in range(a, a + n)}
