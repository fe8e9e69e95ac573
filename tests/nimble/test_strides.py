"""Strides against torch's own views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_nimble.ir.strides import (
    channels_last,
    dense,
    has_even_rows,
    is_inner,
    order_of,
    reshaped,
    row_major,
)

SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=5).map(tuple)


@given(SHAPES, st.randoms(use_true_random=False), st.data())
def test_a_reshape_is_a_view_exactly_where_torch_says_so(
    shape: tuple[int, ...], random: object, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    strides = dense(shape, tuple(order))
    tensor = torch.empty(64 * 4**5).as_strided(shape, strides)
    parts = [factor for size in shape for factor in _factors(size)]
    cuts = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    wanted: list[int] = []
    for factor, is_new in zip(parts, cuts, strict=True):
        if is_new or not wanted:
            wanted.append(factor)
        else:
            wanted[-1] *= factor
    try:
        expected = tensor.view(wanted)
    except RuntimeError:
        expected = None
    found = reshaped(shape, strides, tuple(wanted))
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert all(size == 1 or a == b for size, a, b in zip(wanted, found, expected.stride(), strict=True))


def _factors(size: int) -> list[int]:
    return [2, 2] if size == 4 else [size]


@given(SHAPES, st.data())
def test_the_order_is_what_the_strides_were_made_from(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    again = dense(shape, order_of(shape, dense(shape, order)))
    assert all(a == b for size, a, b in zip(shape, again, dense(shape, order), strict=True) if size > 1)


def test_channels_last_is_torchs() -> None:
    tensor = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert dense((2, 3, 4, 5), channels_last(4)) == tensor.stride()
    assert channels_last(2) == row_major(2) == (0, 1)


def test_even_rows() -> None:
    assert has_even_rows((2, 3, 4), (24, 8, 1))  # every other row of eight
    assert not has_even_rows((2, 3, 4), (25, 8, 1))  # a gap after three rows
    assert not has_even_rows((2, 3, 4), (12, 1, 3))
    assert has_even_rows((4,), (1,))
    assert not has_even_rows((4,), (2,))
    assert has_even_rows((1,), (7,))
    assert not has_even_rows((2, 2, 4), (25, 8, 1)), "two and two rows are not four at one distance"
    assert has_even_rows((3, 4), (99, 1))
    assert has_even_rows((2, 3, 1), (3, 1, 9))  # rows of one element, in a row
    assert not has_even_rows((2, 3, 1), (4, 1, 1))
    assert has_even_rows((5, 4), (0, 1))  # one row, five times
    assert not has_even_rows((2, 5, 4), (4, 0, 1))  # each row five times


@pytest.mark.parametrize("rank", range(6))
def test_orders_are_permutations_and_channels_stand_last_in_images_alone(rank: int) -> None:
    assert sorted(channels_last(rank)) == list(row_major(rank)) == list(range(rank))
    expected = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
    assert channels_last(rank) == expected.get(rank, row_major(rank))


def test_dense_strides_count_empty_dimensions_as_one() -> None:
    assert dense((2, 0, 3), row_major(3)) == torch.empty(2, 0, 3).stride() == (3, 3, 1)
    assert dense((), ()) == ()
    assert dense((2, 3, 4), (2, 0, 1)) == (3, 1, 6)


def test_the_order_goes_by_stride_and_puts_ones_where_they_are_row_by_row() -> None:
    assert order_of((2, 3, 4), (1, 8, 2)) == (1, 2, 0)
    assert order_of((2, 1, 4), (1, 99, 2)) == (2, 1, 0)
    assert order_of((1, 3, 4), (0, 1, 3)) == (0, 2, 1)
    assert order_of((3, 4, 5), (0, 0, 1)) == (2, 0, 1), "expanded dimensions keep their order"
    assert order_of((1, 1), (1, 1)) == (0, 1)


@pytest.mark.parametrize(
    ("shape", "strides", "wanted", "expected"),
    [
        ((2, 0), (5, 1), (0, 7), (7, 1)),  # nothing to show: any strides do
        ((2, 3), (3, 1), (6,), (1,)),
        ((2, 3), (4, 1), (6,), None),  # a gap after each row
        ((2, 3), (4, 1), (2, 3, 1), (4, 1, 1)),
        ((2, 3), (4, 1), (2, 1, 3), (4, 1, 1)),
        ((4, 3), (4, 1), (2, 2, 3), (8, 4, 1)),
        ((4, 3), (4, 1), (2, 6), None),
        ((2, 6), (9, 1), (2, 2, 3), (9, 3, 1)),
        ((2, 6), (9, 1), (4, 3), None),
        ((6,), (2,), (2, 3), (6, 2)),
        ((2, 3), (0, 1), (2, 3, 1), (0, 1, 1)),
        ((2, 3), (0, 1), (6,), None),
        ((2, 3), (0, 0), (6,), (0,)),
        ((1, 1), (5, 7), (1,), (1,)),
        ((1,), (3,), (), ()),
        ((), (), (1, 1), (1, 1)),
        ((2, 3, 4), (12, 4, 1), (3, 8), (8, 1)),
        ((2, 3, 4), (12, 4, 1), (8, 3), (3, 1)),
    ],
)
def test_a_reshape_by_hand(shape: Any, strides: Any, wanted: Any, expected: Any) -> None:
    assert reshaped(shape, strides, wanted) == expected


def test_contiguous_dimensions_are_recognised() -> None:
    assert is_inner(1, (2, 3), (3, 1))
    assert not is_inner(0, (2, 3), (3, 1))
    assert is_inner(0, (1, 3), (99, 1)), "of one element"
