"""Strides against torch's own views."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_nimble.strides import channels_last, dense, has_even_rows, order_of, reshaped, row_major

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
