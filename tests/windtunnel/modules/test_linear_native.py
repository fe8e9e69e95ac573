"""Linear maps of one output by the kernel, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_windtunnel.modules.native import NativeLinear, Weights, kernel

pytestmark = pytest.mark.usefixtures("kernel_level")


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 250])
@pytest.mark.parametrize("order", ["C", "F"])
def test_values_and_probabilities(rows: int, order: str):
    rng = np.random.default_rng(0)
    numbers = np.asarray(rng.normal(size=(rows, 5)), order=order)
    codes = np.asarray(rng.integers(0, 3, size=(rows, 2)).astype(float), order=order)
    weight, table = rng.normal(size=5), rng.normal(size=7)
    first = np.array([0, 4])
    linear = NativeLinear(kernel(), [Weights(weight), Weights(table, first)], bias=0.5)
    expected = 0.5 + numbers @ weight + table[codes.astype(int) + first].sum(axis=1)
    np.testing.assert_allclose(linear(numbers, codes), expected[:, None], rtol=0, atol=1e-14)
    second = 1 / (1 + np.exp(-3 * expected))
    got = linear(numbers, codes, slope=3.0)
    np.testing.assert_allclose(got, np.stack([1 - second, second], axis=1), rtol=0, atol=1e-15)
    numbers.flags.writeable = False
    np.testing.assert_array_equal(linear(numbers, codes, slope=3.0), got)


def test_extremes():
    linear = NativeLinear(kernel(), [Weights(np.array([1.0]))], bias=0.0)
    x = np.array([[np.nan], [np.inf], [-np.inf], [800.0], [-800.0], [0.0]])
    expected = [[np.nan, np.nan], [0, 1], [1, 0], [0, 1], [1, 0], [0.5, 0.5]]
    np.testing.assert_array_equal(linear(x, slope=1.0), expected)
    assert linear(x[:0], slope=1.0).shape == (0, 2)


def test_a_row_has_the_same_bits_alone_and_in_any_layout():
    rng = np.random.default_rng(0)
    for width in (1, 3, 4, 7, 28):
        x = rng.normal(size=(37, width))
        linear = NativeLinear(kernel(), [Weights(rng.normal(size=width))], bias=0.3)
        for slope in (0.0, 1.0):
            together = linear(x, slope=slope)
            np.testing.assert_array_equal(linear(np.asfortranarray(x), slope=slope), together)
            np.testing.assert_array_equal(linear(np.repeat(x, 2, axis=1)[:, ::2], slope=slope), together)
            alone = np.concatenate([linear(x[row : row + 1], slope=slope) for row in range(len(x))])
            np.testing.assert_array_equal(alone, together)


def test_the_logistic_function_is_exact_over_the_range_of_doubles():
    linear = NativeLinear(kernel(), [Weights(np.array([1.0]))], bias=0.0)
    x = np.concatenate([np.linspace(-760, 760, 20_001), np.linspace(-40, 40, 20_001), [-0.0, 5e-324, -1e-17]])
    answer = linear(x[:, None], slope=1.0)
    small = np.exp(-np.abs(x))
    second = np.where(x < 0, small, 1) / (1 + small)
    np.testing.assert_allclose(answer[:, 1], second, rtol=5e-16, atol=1e-323)
    np.testing.assert_array_equal(answer[:, 0], 1 - answer[:, 1])
