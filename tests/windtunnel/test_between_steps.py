"""Tables between steps: sparse, of one dimension, frames; ``tests/oracles/windtunnel_containers`` draws the class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.finetune.estimators import WindTunnelClassifier
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import make_column_transformer
from sklearn.ensemble import StackingRegressor, VotingRegressor
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import Lasso, LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MaxAbsScaler, OneHotEncoder, SplineTransformer, StandardScaler

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"k": RNG.choice(list("abcdefgh"), 400), "a": RNG.normal(size=400) * RNG.choice([0, 1], 400)})
TARGET = (FRAME.a + (FRAME.k < "c") + RNG.normal(size=400) > 0.5).to_numpy().astype(int)
SPARSE = scipy.sparse.random(200, 5, 0.4, format="csr", random_state=0)
STACKED = {
    "vote": VotingRegressor([("a", Ridge()), ("b", Lasso())]),
    "stack": StackingRegressor([("a", Ridge()), ("b", Lasso())], Ridge(), cv=2),
    "pipeline": make_pipeline(StandardScaler(), VotingRegressor([("a", Ridge()), ("b", Lasso())])),
}


def test_what_a_sparse_table_does_not_store_is_missing_to_xgboost(tmp_path: Path):
    booster = pytest.importorskip("xgboost").XGBClassifier(n_estimators=8, max_depth=4)
    columns = make_column_transformer((OneHotEncoder(), ["k"]), ("passthrough", ["a"]), sparse_threshold=1)
    source = make_pipeline(columns, booster).fit(FRAME[:300], TARGET[:300])
    module = translate(source)
    for each in (module, load(save(module, tmp_path / "folder"))):
        np.testing.assert_allclose(each.predict_proba(FRAME), source.predict_proba(FRAME), rtol=1e-5)
    tuned = WindTunnelClassifier(source, epochs=1).fit(FRAME[:300], TARGET[:300])
    losses = [log_loss(TARGET[300:], each.predict_proba(FRAME[300:])) for each in (tuned, source)]
    assert losses[0] <= losses[1] + 0.02


def test_a_zero_that_is_stored_is_no_missing_cell():
    booster = pytest.importorskip("xgboost").XGBRegressor(n_estimators=8)
    knots = np.array([[0.0], [1.0], [2.0], [3.0]])  # of the splines that meet at a knot, some store 0 there
    splines = SplineTransformer(degree=2, knots=knots, sparse_output=True)
    x = RNG.choice([0.0, 0.5, 1, 1.5, 2, 3], (200, 1))
    source = make_pipeline(splines, booster).fit(x, np.sin(3 * x[:, 0]))
    assert (source[0].transform(x).data == 0).any()
    np.testing.assert_allclose(translate(source).predict(x), source.predict(x), rtol=1e-5)


@pytest.mark.parametrize("before", [(), (MaxAbsScaler(),)])
def test_sparse_batches_reach_xgboost_as_they_are_or_are_refused(before: tuple[Any, ...]):
    make = pytest.importorskip("xgboost").XGBRegressor
    y = SPARSE.toarray() @ np.arange(5.0)
    source = make_pipeline(*before, make(n_estimators=8)).fit(SPARSE.toarray(), y)
    module = translate(source)
    for x in (SPARSE, SPARSE.tocsc(), SPARSE.toarray()):
        np.testing.assert_allclose(module.predict(x), source.predict(x), rtol=1e-5)
    both = make_pipeline(*before, VotingRegressor([("x", make(n_estimators=2)), ("r", Ridge())])).fit(SPARSE, y)
    with pytest.raises(InvalidInputError, match="Sparse data was passed"):
        translate(both).predict(SPARSE)  # one reads what is not stored as 0, the other as missing


def test_a_series_reaches_a_vectoriser_and_a_frame_a_function_of_the_users_own():
    texts = pd.DataFrame({"t": ["b a", "b c", "c a a", "d"] * 9})
    words = make_pipeline(FunctionTransformer(lambda x: x["t"]), CountVectorizer(token_pattern="[a-z]"), Ridge())
    source = words.fit(texts, np.arange(36.0))
    np.testing.assert_allclose(translate(source).predict(texts), source.predict(texts))
    columns = make_column_transformer((OneHotEncoder(sparse_output=False), ["k"]), ("passthrough", ["a"]))
    named = make_pipeline(
        columns.set_output(transform="pandas"), FunctionTransformer(lambda x: x.filter(like="onehot")), Ridge()
    ).fit(FRAME, FRAME.a)
    np.testing.assert_allclose(translate(named, FRAME[:9]).predict(FRAME), named.predict(FRAME))


@pytest.mark.parametrize("final", STACKED.values(), ids=STACKED)
def test_transform_of_a_stack_is_its_members_answers_whatever_is_last(final: Any):
    x = RNG.normal(size=(90, 3))
    source = StackingRegressor([("a", Ridge()), ("b", Ridge(100))], final, cv=2).fit(x, 50 * x[:, 0])
    np.testing.assert_allclose(translate(source).transform(x), source.transform(x))


class Ratio(BaseEstimator, TransformerMixin):
    """A step that keeps nothing of its fit."""

    def fit(self, x: Any, y: Any = None) -> Ratio:
        """Return the step."""
        return self

    def transform(self, x: Any) -> Any:
        """Return the numbers with a column more."""
        return x[["a"]].assign(twice=x["a"] * 2)


def test_a_step_of_the_users_own_need_not_keep_anything_of_its_fit():
    columns = make_column_transformer((Ratio(), ["a"]), (OneHotEncoder(), ["k"]))
    for source in (make_pipeline(Ratio(), Ridge()), make_pipeline(columns, Ridge())):
        source.fit(FRAME, TARGET)
        np.testing.assert_allclose(translate(source, FRAME[:9]).predict(FRAME), source.predict(FRAME))
    with pytest.raises(InvalidInputError, match="standardscaler is not fitted"):
        translate(make_pipeline(StandardScaler(), Ratio(), Ridge().fit([[0.0, 0.0]], [0.0])))


def test_a_pipeline_is_translated_within_inference_mode_and_trained_after():
    x = RNG.normal(size=(50, 2))
    source = make_pipeline(StandardScaler(), LogisticRegression()).fit(x, x[:, 0] > 0)
    with torch.inference_mode():
        module = translate(source)
        np.testing.assert_allclose(module.predict_proba(x), source.predict_proba(x))
    module(torch.from_numpy(module.encode(x))).sum().backward()
    assert all(each.grad is not None for each in module.parameters())
