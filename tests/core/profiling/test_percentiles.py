from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_core.profiling import summarise


def test_known_values() -> None:
    d = summarise(range(1, 102))  # 1..101: the q-th percentile is 1 + q
    assert (d.count, d.total, d.mean, d.min, d.p50, d.p90, d.p99, d.max) == (101, 5151, 51, 1, 51, 91, 100, 101)
    assert d.std == pytest.approx(math.sqrt((101**2 - 1) / 12))


def test_percentiles_interpolate_between_neighbours() -> None:
    d = summarise([0.0, 10.0])
    assert (d.p50, d.p90, d.p99) == pytest.approx((5.0, 9.0, 9.9))


def test_one_value_is_all_of_them() -> None:
    d = summarise(np.array([3.5], dtype=np.float32))
    assert {d.mean, d.min, d.p50, d.p90, d.p99, d.max, d.total} == {3.5}
    assert d.std == 0


def test_no_values() -> None:
    d = summarise([])
    assert (d.count, d.total) == (0, 0)
    assert math.isnan(d.p99)
    assert d.to_dict() == {
        "count": 0, "total": 0.0, "mean": None, "std": None, "min": None,
        "p50": None, "p90": None, "p99": None, "max": None,
    }  # fmt: skip


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_order_of_the_figures(values: list[float]) -> None:
    d = summarise(values)
    slack = 1e-6
    assert d.min <= d.p50 <= d.p90 + slack <= d.p99 + 2 * slack <= d.max + 3 * slack
    assert d.min - slack <= d.mean <= d.max + slack


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(InvalidInputError, match=r"values\[1\] is (nan|inf|-inf)"):
        summarise([1.0, value])


def test_other_shapes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"shape \(2, 2\)"):
        summarise(np.ones((2, 2)))
