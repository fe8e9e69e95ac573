"""Whole pages within pieces of memory, and what is left of the pieces without them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from mlsys_nimble.state.pages import pieces_without, whole_pages, without

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
