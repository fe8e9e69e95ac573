"""Ranges of addresses: which whole pages a tensor has, and what is left of it without them. No torch, no system."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
