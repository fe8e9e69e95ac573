"""Contracts: which numbers are taken, and in what words others are refused."""

from __future__ import annotations

import numpy as np
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.checks.values import BEYOND_FLOAT32, Contract, is_tame

ANY = [[0.0, -1e300], [1e300, 2.0]]


def _table(*cells):
    return np.array([cells], np.float64)


@pytest.mark.parametrize("cell", [np.nan, np.inf, -np.inf])
def test_a_plain_contract_takes_finite_numbers_alone(cell):
    contract = Contract("Ridge")
    contract.check(np.array(ANY))
    with pytest.raises(InvalidInputError, match=r"Input X contains .*Ridge"):
        contract.check(_table(1.0, cell))


def test_missing_values_are_taken_and_infinity_is_not():
    contract = Contract("StandardScaler", takes_nan=True)
    contract.check(_table(np.nan, 1.0))
    with pytest.raises(InvalidInputError, match="contains infinity"):
        contract.check(_table(np.nan, np.inf))


def test_an_open_field_refuses_nothing():
    contract = Contract("HistGradientBoostingClassifier", takes_nan=True, takes_inf=True)
    contract.check(_table(np.nan, np.inf))
    assert contract.takes_all
    assert not Contract("Ridge").takes_all


def test_numbers_beyond_float32_are_refused_where_the_source_rounds():
    contract = Contract("DecisionTreeClassifier", rounds_to_float32=True)
    largest = np.nextafter(BEYOND_FLOAT32, 0)
    with np.errstate(over="ignore"):
        assert np.isfinite(np.float32(largest))
        assert np.isinf(np.float32(BEYOND_FLOAT32))
    contract.check(_table(largest, -largest))
    for cell in (BEYOND_FLOAT32, -BEYOND_FLOAT32):
        with pytest.raises(InvalidInputError, match="float32"):
            contract.check(_table(1.0, cell))


def test_bounds_hold_for_tame_numbers_too():
    Contract("Isotonic", low=0.0, high=2.0).check(_table(0.0, 2.0))
    for cell, words in ((-0.1, "below 0"), (2.1, "above 2")):
        with pytest.raises(InvalidInputError, match=words):
            Contract("Isotonic", low=0.0, high=2.0).check(_table(1.0, cell))


def test_contracts_are_alike_whatever_they_are_called():
    assert Contract("Ridge").is_like(Contract("Lasso"))
    assert not Contract("Ridge").is_like(Contract("Lasso", takes_nan=True))


@pytest.mark.parametrize("order", ["C", "F"])
def test_tame_tables_are_told_whatever_their_layout(order):
    x = np.asarray(np.arange(12.0).reshape(3, 4), order=order)
    assert is_tame(x)
    assert is_tame(x[:, ::2])
    assert is_tame(x[:0])
    for cell in (np.nan, np.inf, 1e36):
        x[2, 3] = cell
        assert not is_tame(x)
        assert is_tame(x[:, :3])
