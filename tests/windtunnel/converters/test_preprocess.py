"""Functions, thresholds, norms, products, splines, and regressors of transformed targets."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from lightgbm import LGBMRegressor
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from scipy import special
from sklearn.compose import TransformedTargetRegressor, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    Binarizer,
    FunctionTransformer,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    PolynomialFeatures,
    PowerTransformer,
    QuantileTransformer,
    SplineTransformer,
    StandardScaler,
)

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(11)
X, FRESH = RNG.normal(size=(60, 4)), RNG.normal(size=(25, 4)) * 2
Y = X @ [1.0, -2, 0.5, 3] + 0.7


def test_binarizer_at_its_threshold(same_answers):
    rows = np.array([[0.0, 0.5, 1.0], [-1.0, 0.25, 0.3]])
    for threshold in (0.0, 0.25, -1.0):
        same_answers(Binarizer(threshold=threshold).fit(rows), rows, trained=False)
    sparse = scipy.sparse.random(9, 4, 0.5, random_state=0, format="csr")
    same_answers(Binarizer(threshold=0.3).fit(sparse), sparse, trained=False)


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_normalizer(same_answers, norm):
    rows = np.vstack([FRESH, np.zeros((1, 4)), np.full((1, 4), 1e-17), [[-3.0, 3, 3, 0]], np.full((1, 4), 1e-15)])
    source = Normalizer(norm).fit(X)
    same_answers(source, rows, trained=False)
    same_answers(source, FRESH[:1].astype(np.float32), trained=False)
    same_answers(source, scipy.sparse.random(9, 4, 0.3, random_state=0, format="csr"), trained=False)
    same_answers(make_pipeline(StandardScaler(), Normalizer(norm)).fit(X), np.vstack([FRESH, X.mean(0)]))


@pytest.mark.parametrize("degree", [0, 1, 2, 3, 4, 6, (0, 2), (1, 3), (2, 3), (3, 3), (0, 0)])
@pytest.mark.parametrize("interaction_only", [True, False])
@pytest.mark.parametrize("include_bias", [True, False])
def test_polynomial_features(same_answers, degree, interaction_only, include_bias):
    if not include_bias and degree in (0, (0, 0)):
        pytest.skip("no feature at all is refused by fit")
    source = PolynomialFeatures(degree, interaction_only=interaction_only, include_bias=include_bias).fit(X)
    module = same_answers(source, FRESH, trained=False)
    assert (module.transform(FRESH) == source.transform(FRESH)).all(), "the same multiplications, bit for bit"
    same_answers(source, scipy.sparse.csr_matrix(np.where(FRESH > 0, FRESH, 0)), trained=False)
    same_answers(source.fit(X[:, :1]), FRESH[:1, :1], trained=False)


@pytest.mark.parametrize(
    "function",
    [
        *(np.abs, np.exp, np.expm1, np.log, np.log10, np.log1p, np.log2, np.positive, np.sqrt, np.square),
        *(special.expit, special.expm1, special.log1p, special.logit),
    ],
    ids=lambda function: function.__name__,
)
def test_functions(same_answers, function):
    rows = np.array([[0.0, 1e-12, 0.3], [0.5, 0.9999, 1.0]])
    same_answers(FunctionTransformer(function).fit(rows), rows, trained=False)
    same_answers(make_pipeline(MinMaxScaler((0.1, 0.9)), FunctionTransformer(function)).fit(X), X)


def _named_like_a_known_one(x):
    return x * 0


_named_like_a_known_one.__name__ = "log1p"


@pytest.mark.parametrize(
    "source",
    [
        FunctionTransformer(_named_like_a_known_one),
        FunctionTransformer(partial(np.log1p)),
        FunctionTransformer(np.log1p, kw_args={"where": np.True_}),
    ],
    ids=["of ones own", "partial", "further arguments"],
)
def test_other_functions_are_refused(source):
    with pytest.raises(InvalidInputError, match="FunctionTransformer"):
        translate(source.fit(np.abs(X)))


@pytest.mark.parametrize("extrapolation", ["constant", "linear", "continue", "periodic"])
@pytest.mark.parametrize("degree", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("knots", ["uniform", "quantile"])
def test_splines(same_answers, extrapolation, degree, knots):
    if degree == 0 and extrapolation in ("constant", "linear"):
        pytest.skip("scikit-learn fails on them")
    for num_knots, include_bias in ((2, True), (5, False), (7, True)):
        if extrapolation == "periodic" and num_knots <= degree:
            continue
        width = 1 if extrapolation == "linear" and degree == 1 else 4
        source = SplineTransformer(
            num_knots, degree=degree, knots=knots, extrapolation=extrapolation, include_bias=include_bias
        ).fit(X[:, :width])
        inner = source.bsplines_[0].t
        rows = np.vstack([FRESH, X.min(0), X.max(0), X.min(0) - 3, X.max(0) + 3, np.tile(inner[:, None], 4)])
        same_answers(source, rows[:, :width], trained=False)


def test_splines_of_missing_values(same_answers):
    rows = np.where(RNG.random(FRESH.shape) < 0.3, np.nan, FRESH)
    for extrapolation in ("constant", "linear", "continue", "periodic"):
        source = SplineTransformer(handle_missing="zeros", extrapolation=extrapolation).fit(X)
        same_answers(source, rows, trained=False)
        sparse = SplineTransformer(handle_missing="zeros", extrapolation=extrapolation, sparse_output=True)
        width = 4 if extrapolation in ("constant", "linear") else 1
        same_answers(sparse.fit(X[:, :width]), rows[:, :width], trained=False)


@pytest.mark.parametrize(
    "source",
    [
        SplineTransformer(extrapolation="error"),
        SplineTransformer(knots="quantile"),
        SplineTransformer(degree=0),
        SplineTransformer(degree=1, extrapolation="linear"),
        SplineTransformer(extrapolation="continue", handle_missing="zeros", sparse_output=True),
    ],
    ids=["error", "knots that coincide", "steps", "lines", "sparse with missing values"],
)
def test_splines_that_cannot_be_reproduced_are_refused(source):
    rows = np.repeat([0.0, 0, 0, 0, 1], 4)[:, None] if source.knots == "quantile" else X
    with pytest.raises(InvalidInputError, match="SplineTransformer"):
        translate(source.fit(rows))


@pytest.mark.parametrize(
    "source",
    [
        TransformedTargetRegressor(),
        TransformedTargetRegressor(Ridge(), func=np.log, inverse_func=np.exp),
        TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1),
        TransformedTargetRegressor(Ridge(), transformer=StandardScaler()),
        TransformedTargetRegressor(Ridge(), transformer=MinMaxScaler(clip=True)),
        TransformedTargetRegressor(Ridge(), transformer=PowerTransformer()),
        TransformedTargetRegressor(Ridge(), transformer=PowerTransformer(method="box-cox")),
        TransformedTargetRegressor(Ridge(), transformer=QuantileTransformer(n_quantiles=20)),
        TransformedTargetRegressor(
            Ridge(), transformer=QuantileTransformer(n_quantiles=30, output_distribution="normal")
        ),
        TransformedTargetRegressor(make_pipeline(StandardScaler(), LinearRegression()), transformer=StandardScaler()),
    ],
    ids=repr,
)
def test_transformed_targets(same_answers, source):
    target = np.exp(Y / 4)
    for y in (target, target[:, None], np.stack([target, np.exp(X[:, 0])], axis=1)):
        source.fit(X, y)
        same_answers(source, X)
        same_answers(source, FRESH[:3])
    same_answers(make_pipeline(StandardScaler(), source).fit(X, target), X)


def _thirds(y):
    return y / 3


def _threefold(y):
    return y * 3


@pytest.mark.parametrize(
    "source",
    [
        TransformedTargetRegressor(Ridge(), func=_thirds, inverse_func=_threefold),
        TransformedTargetRegressor(Ridge(), transformer=make_pipeline(StandardScaler())),
    ],
    ids=["inverse_func=_threefold: a function of your own", "transformer=Pipeline: its inverse"],
)
def test_targets_that_cannot_be_taken_back_are_refused(source, request):
    reason = request.node.callspec.id
    with pytest.raises(InvalidInputError, match=f"TransformedTargetRegressor declines {reason}"):
        translate(source.fit(X, Y))


def _prices():
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"area": rng.gamma(4.0, 20.0, 200), "city": rng.choice(["Bern", "Oslo", "Rome"], 200)})
    frame.loc[::9, "area"] = np.nan
    return frame, np.exp(1 + 0.01 * frame.area.fillna(80) + 0.4 * (frame.city == "Rome")).to_numpy()


def _mixed(model):
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    return make_pipeline(make_column_transformer((numbers, ["area"]), (OneHotEncoder(), ["city"])), model)


@pytest.mark.parametrize(
    "model", [Ridge(), LGBMRegressor(n_estimators=10, verbose=-1, n_jobs=1)], ids=["ridge", "trees"]
)
def test_the_standard_price_model(same_answers, model):
    frame, price = _prices()
    source = TransformedTargetRegressor(_mixed(model), func=np.log1p, inverse_func=np.expm1)
    same_answers(source.fit(frame, price), frame)
    search = GridSearchCV(
        TransformedTargetRegressor(_mixed(Ridge()), func=np.arcsinh, inverse_func=np.sinh),
        {"regressor__ridge__alpha": [0.1, 1.0]},
    )
    module = same_answers(search.fit(frame, price), frame)
    np.testing.assert_allclose(
        module.predict({"area": [50.0, np.nan], "city": ["Oslo", "Rome"]}),
        search.predict(pd.DataFrame({"area": [50.0, np.nan], "city": ["Oslo", "Rome"]})),
        rtol=1e-9,
    )


def test_a_step_of_ones_own_below_a_transformed_target_stays_on_the_host(same_answers):
    source = TransformedTargetRegressor(make_pipeline(FunctionTransformer(_thirds), Ridge()))
    module = same_answers(source.fit(X, Y), FRESH, with_example=True)
    assert module.frontend.fallbacks == ("sklearn.preprocessing.FunctionTransformer",)


def test_steps_are_trained_through_and_exported(same_answers):
    source = make_pipeline(
        StandardScaler(),
        SplineTransformer(4),
        PolynomialFeatures(2, interaction_only=True),
        Normalizer(),
        LogisticRegression(),
    ).fit(X, Y > 0)
    module = same_answers(source, FRESH)
    rows = torch.export.Dim("rows")
    exported = torch.export.export(module, (torch.from_numpy(FRESH),), dynamic_shapes=({0: rows},)).module()
    np.testing.assert_allclose(exported(torch.from_numpy(X)).detach(), source.predict_proba(X), atol=1e-9)
