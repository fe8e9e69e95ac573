"""Scalers and distribution transformers: every combination of options, missing values, repeated values, inverses."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.scale import inverse_of
from mlsys_windtunnel.convert.translation import translate
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MaxAbsScaler,
    MinMaxScaler,
    PowerTransformer,
    QuantileTransformer,
    RobustScaler,
    StandardScaler,
)

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(3)


def _table(rows: int, rng: np.random.Generator) -> np.ndarray:
    """A normal column, a large one, a skewed one, one of few values, a constant one."""
    return np.stack(
        [
            rng.normal(size=rows),
            rng.normal(1e4, 50, size=rows),
            rng.exponential(3, size=rows) + 0.01,
            rng.integers(1, 4, size=rows).astype(float),
            np.full(rows, 2.0),
        ],
        axis=1,
    )


X, FRESH = _table(120, RNG), _table(40, RNG) * 1.1
HOLES = np.where(RNG.random(X.shape) < 0.2, np.nan, X)


SCALERS = [
    StandardScaler(),
    StandardScaler(with_mean=False),
    StandardScaler(with_std=False),
    StandardScaler(with_mean=False, with_std=False),
    MinMaxScaler(),
    MinMaxScaler((-3, 5), clip=True),
    MaxAbsScaler(),
    MaxAbsScaler(clip=True),
    RobustScaler(),
    RobustScaler(with_centering=False, unit_variance=True),
    RobustScaler(with_scaling=False, quantile_range=(5, 95)),
    QuantileTransformer(n_quantiles=50),
    QuantileTransformer(n_quantiles=120, output_distribution="normal"),
    QuantileTransformer(n_quantiles=7),
]


@pytest.mark.parametrize("source", SCALERS, ids=repr)
def test_scalers(same_answers, source):
    source.fit(X)
    same_answers(source, FRESH)
    same_answers(source, X)
    same_answers(source, FRESH[:1])
    source.fit(HOLES)
    same_answers(source, np.vstack([HOLES[:20], FRESH]))


@pytest.mark.parametrize("standardize", [True, False])
def test_yeo_johnson(same_answers, standardize):
    # Not the constant column: no exponent is likeliest there, and what is fitted is rounding error of the machine.
    source = PowerTransformer(standardize=standardize).fit(X[:, :-1])
    same_answers(source, FRESH[:, :-1])
    same_answers(source, X[:, :-1])
    same_answers(source, FRESH[:1, :-1])
    same_answers(source.fit(HOLES[:, :-1]), np.vstack([HOLES[:20], FRESH])[:, :-1])


@pytest.mark.parametrize("source", [MaxAbsScaler(clip=True), MinMaxScaler((-3, 5), clip=True)], ids=repr)
def test_clipped_scalers_are_cut_at_both_ends(same_answers, source):
    same_answers(source.fit(X[:, :3]), np.array([[-1e6, -1e6, -1e6], [1e6, 1e6, 1e6], [0.5, 1e4, 1.0]]))


@pytest.mark.parametrize("source", [*SCALERS, PowerTransformer()], ids=repr)
def test_a_fit_in_single_precision(source):
    narrow = X[:, [0, 2]].astype(np.float32)
    module = translate(source.fit(narrow))
    np.testing.assert_allclose(module.transform(narrow), source.transform(narrow), atol=3e-6)


@pytest.mark.parametrize("standardize", [True, False])
def test_box_cox(same_answers, standardize):
    positive = np.abs(X[:, [0, 2, 3]]) + 0.1
    same_answers(PowerTransformer(method="box-cox", standardize=standardize).fit(positive), FRESH[:, [2, 3, 4]] + 0.1)


@pytest.mark.parametrize("method", ["yeo-johnson", "box-cox"])
def test_power_exponents_at_and_near_their_limits(same_answers, method):
    exponents = np.array([0.0, 2.0, 1.0, 1e-7, 2 + 1e-6, -3.5, 7.0])
    rows = np.linspace(0.001 if method == "box-cox" else -5, 5, 70).reshape(-1, 7)
    source = PowerTransformer(method=method, standardize=False).fit(np.abs(rows) + 0.1)
    source.lambdas_ = exponents
    module = same_answers(source, rows)
    module.zero_grad()
    module(torch.from_numpy(rows)).sum().backward()
    assert all((parameter.grad.abs() > 0).all() for parameter in module.parameters())


def test_quantiles_with_repeats_and_ends(same_answers):
    """Repeated training values, the exact ends, just within and beyond them, and points between."""
    column = np.repeat([0.0, 1, 1, 2, 5, 5, 5, 9], 5)[:, None]
    points = np.unique(np.concatenate([column.ravel(), np.linspace(-1, 10, 45), [5e-8, 9 - 5e-8, 2e-7, 1e300]]))[
        :, None
    ]
    for distribution in ("uniform", "normal"):
        for num_quantiles in (2, 5, 11, 40):
            source = QuantileTransformer(n_quantiles=num_quantiles, output_distribution=distribution).fit(column)
            same_answers(source, points)


def test_sparse_tables(same_answers):
    rows = scipy.sparse.random(60, 4, 0.6, random_state=0, format="csr")
    for source in (
        StandardScaler(with_mean=False),
        MaxAbsScaler(clip=True),
        RobustScaler(with_centering=False),
        QuantileTransformer(n_quantiles=20),
    ):
        same_answers(source.fit(rows), rows)


def test_quantiles_that_cannot_be_reproduced_are_refused():
    for source, rows in (
        (QuantileTransformer(n_quantiles=10, ignore_implicit_zeros=True), scipy.sparse.csr_matrix(X)),
        (QuantileTransformer(n_quantiles=1), X),
        (QuantileTransformer(n_quantiles=10), np.column_stack([X[:, 0], np.full(120, np.nan)])),
    ):
        with pytest.raises(InvalidInputError, match="QuantileTransformer"):
            translate(source.fit(rows))


def test_missing_values_give_no_gradient_that_is_missing():
    source = make_pipeline(StandardScaler(), PowerTransformer(), SimpleImputer(), LogisticRegression()).fit(
        HOLES[:, :4], X[:, 0] > 0
    )
    for scaler in (source[0], source[1]):
        module = translate(scaler)
        answer = module(torch.from_numpy(HOLES[:, :4].copy()))
        torch.where(torch.isnan(answer), 0.0, answer).square().sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


INVERTED = [*SCALERS, PowerTransformer(method="box-cox"), PowerTransformer(standardize=False)]


@pytest.mark.parametrize("source", INVERTED, ids=repr)
def test_inverses(source):
    source.fit(np.abs(X[:, :4]))
    answers = source.transform(np.abs(FRESH[:, :4]))
    answers = np.vstack([answers, np.clip(answers, 0, 1), np.clip(answers, -1, 1)])
    expected = source.inverse_transform(answers)
    got = inverse_of(source)(torch.from_numpy(answers)).detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
