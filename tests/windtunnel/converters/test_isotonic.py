"""Isotonic regression interpolates as its source does, at, between and beyond its thresholds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.modules.combine.calibrate import interp
from sklearn.isotonic import IsotonicRegression

RNG = np.random.default_rng(3)
X = np.sort(RNG.normal(size=60)).round(1)
Y = X + RNG.normal(size=60)
FINITE = st.floats(-1e6, 1e6)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=8, unique=True), st.lists(FINITE, min_size=8), st.data())
def test_interp_is_numpys(knots, values, data):
    knots, values = np.sort(knots).astype(float), np.array(values[: len(knots)])
    x = np.array(data.draw(st.lists(st.one_of(FINITE, st.sampled_from(list(knots))), min_size=1, max_size=9)))
    tensors = (torch.from_numpy(array) for array in (x, knots, values))
    np.testing.assert_allclose(interp(*tensors), np.interp(x, knots, values), rtol=1e-12, atol=1e-9)


def test_interp_of_infinity_and_nan():
    knots, values = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 4.0])
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    np.testing.assert_array_equal(interp(x, knots, values), [4, 2, np.nan, 4])
    np.testing.assert_array_equal(interp(x, knots, values, outside="nan"), [np.nan, np.nan, np.nan, 4])


@pytest.mark.parametrize("increasing", [True, False, "auto"])
@pytest.mark.parametrize("outside", ["clip", "nan"])
def test_isotonic_regression(same_answers, increasing, outside):
    source = IsotonicRegression(increasing=increasing, out_of_bounds=outside).fit(X, Y)
    rows = np.concatenate([source.X_thresholds_, np.linspace(-9, 9, 100)])[:, None]
    same_answers(source, rows, with_example=True)
    same_answers(source, rows[:1], with_example=True)


def test_errors_of_the_source_are_refusals(same_answers):
    source = IsotonicRegression(out_of_bounds="raise").fit(X, Y)
    inside = np.linspace(X[0], X[-1], 50)[:, None]
    same_answers(source, inside, with_example=True)
    with pytest.raises(ValueError, match="above"):
        source.predict([[99.0]])
    with pytest.raises(InvalidInputError, match="takes no numbers above"):
        translate(source, X[:, None]).predict([[99.0]])


def test_a_single_threshold_is_a_constant(same_answers):
    same_answers(IsotonicRegression(out_of_bounds="nan").fit([1.0], [2.0]), np.array([[1.0], [5.0]]), with_example=True)


def test_a_fit_on_float32_rounds_its_input(same_answers):
    source = IsotonicRegression(out_of_bounds="clip").fit([0.1, 0.2, 0.3], np.array([0.0, 1.0, 7.0]))
    same_answers(source, RNG.random((20, 1)).astype(np.float32), with_example=True)
    steep = np.array([1.0, 1.0 + 2.0**-10], np.float32)
    source = IsotonicRegression(out_of_bounds="clip").fit(steep, np.array([0.0, 1.0], np.float32))
    assert source.X_thresholds_.dtype == np.float32
    between = 1.0 + np.linspace(0, 2.0**-10, 30)[:, None]
    assert abs(np.interp(between[:, 0], steep, [0, 1]) - source.predict(between)).max() > 1e-5, "so rounding shows"
    same_answers(source, between, with_example=True)
