"""Sizes as polynomials, and memory plans that follow them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core.memory import plan_offsets_for_conflicts
from mlsys_nimble.capture.watched import Questions, holds, read_whole
from mlsys_nimble.ir.sizes import Atom, NotGeneral, Sheet, Size, evaluate, poly_of, symbol
from mlsys_nimble.planning.storage import stack_of

small = st.integers(1, 40)


@settings(max_examples=25, deadline=None)
@given(hint=st.tuples(small, small), at=st.tuples(small, small), data=st.data())
def test_a_size_computes_what_integers_compute_at_any_size(hint, at, data):
    sizes, plain = [symbol("a", hint[0]), symbol("b", hint[1])], [*at]
    known = {Atom("a"): at[0], Atom("b"): at[1]}
    for _ in range(data.draw(st.integers(1, 6))):
        one, two = (data.draw(st.integers(0, len(sizes) - 1)) for _ in range(2))
        number = data.draw(st.integers(1, 9))
        make = data.draw(
            st.sampled_from(
                [
                    lambda x, y, n: x + y,
                    lambda x, y, n: x - y + n,
                    lambda x, y, n: x * y,
                    lambda x, y, n: n - x * 2,
                    lambda x, y, n: x // n,
                    lambda x, y, n: x % n + y,
                    lambda x, y, n: (x * n) // n,
                    lambda x, y, n: -x,
                ]
            )
        )
        sizes.append(make(sizes[one], sizes[two], number))
        plain.append(make(plain[one], plain[two], number))
        if len(poly_of(sizes[-1])) > 30:
            break
    assert [evaluate(poly_of(size), known) for size in sizes] == plain
    assert Sheet([poly_of(size) for size in sizes]).values(dict(known)).tolist() == plain


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(1, 3)), min_size=2, max_size=6))
def test_a_product_divided_by_a_factor_is_the_other(terms):
    a, b = symbol("a", 3), symbol("b", 5)
    factors = [a + 1, b + a * 2 + 1]
    for number, (kind, shift, by) in enumerate(terms):
        factors[number % 2] = factors[number % 2] * [a, b, a + shift, b + a * b + shift][kind] + by
    one, other = factors
    assert ((one * other) // other, (one * other) % one) == (one, 0)


def test_equal_means_always_equal():
    n = symbol("n", 8)
    assert n != 8
    assert n * 4 == n + n * 3
    assert (n * 12 * 32) // 32 == 12 * n
    assert (n * 12) % 4 == 0
    assert (n % 3) != 0
    assert n - n == 0
    assert not isinstance(n - n, Size)
    assert (n * n + n) // (n + 1) == n
    with pytest.raises(NotGeneral):
        n**2


@settings(max_examples=25, deadline=None)
@given(nbytes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=12), data=st.data())
def test_offsets_keep_conflicting_values_apart_at_any_sizes(nbytes, data):
    count = len(nbytes)
    pairs = {(i, j) for i in range(count) for j in range(i) if data.draw(st.booleans())}
    conflicts = [sum(1 << j for j in range(count) if (i, j) in pairs or (j, i) in pairs) for i in range(count)]
    hint = [first for first, _ in nbytes]
    plan = plan_offsets_for_conflicts(hint, conflicts)
    stack = stack_of(plan.offsets, hint, conflicts, 64)
    for sizes in (hint, [second for _, second in nbytes]):
        offsets, peak = stack.offsets(sizes)
        for i, j in pairs:
            assert offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
        assert all(offset % 64 == 0 and offset + size <= peak for offset, size in zip(offsets, sizes, strict=True))
        if sizes is hint:
            assert peak <= plan.peak_nbytes


def test_what_python_asks_about_a_size_is_noted_with_its_answer():
    questions = Questions()
    n, m = questions.wrapped((6, 2))
    assert n * 2 > 11
    assert n != m
    assert n // 2 == 3
    assert [(q.name, holds(q, [8, 2])) for q in questions.asked] == [("gt", True), ("ne", True), ("eq", False)]
    assert [holds(q, [2, 2]) for q in questions.asked] == [False, False, False]
    assert n**0.5 > 2
    assert [q.name for q in questions.asked][-1] == "is"


def test_slices_of_all_by_a_size_that_was_read_are_kept_apart():
    n = Questions().wrapped(5)
    index, taken = read_whole((slice(None), None, slice(0, n)), (3, 5))
    assert index == (slice(None), None, slice(None))
    assert taken == [(2, 0, 5)]
    assert read_whole((..., slice(n)), (2, 5)) == ((..., slice(None)), [(1, 0, 5)])
    assert read_whole(slice(0, 3), (5,)) == ((slice(0, 3),), [])
