"""Frames of polars answer as they do with the source, which may have been fitted on them or on pandas' frames."""

from __future__ import annotations

import numpy as np
import pytest
from lightgbm import LGBMRegressor
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

pl = pytest.importorskip("polars", reason="pip install polars")

RNG = np.random.default_rng(0)
FRAME = pl.DataFrame(
    {
        "n": [None if value > 1 else value for value in RNG.normal(size=90).tolist()],
        "i": [None, 1, 2] * 30,
        "word": RNG.choice(["a", "b"], 90).tolist(),
        "gap": ["x", None, "y"] * 30,
        "kind": pl.Series(["u", "v", None] * 30, dtype=pl.Categorical),
        "flag": [True, False, None] * 30,
    }
)
Y = (RNG.random(90) > 0.5).astype(int)


def _doubled(frame):
    return frame.with_columns(pl.col("i").fill_null(0) * 2)


def _source(*more):
    words = OneHotEncoder(handle_unknown="ignore")
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    columns = make_column_transformer((numbers, ["n", "i"]), (words, ["word", "gap", "kind", "flag"]), *more)
    return make_pipeline(columns, LogisticRegression())


def _check(source, module, rows):
    np.testing.assert_allclose(module.predict_proba(rows), source.predict_proba(rows), atol=1e-12)


def test_frames_of_polars():
    source = _source().fit(FRAME, Y)
    module = translate(source)
    for rows in (FRAME, FRAME[:1], FRAME.select(list(reversed(FRAME.columns)))):
        _check(source, module, rows)
    by_name = {name: FRAME[name].to_numpy() for name in FRAME.columns}
    np.testing.assert_allclose(module.predict_proba(by_name), source.predict_proba(FRAME), atol=1e-12)


def test_steps_on_the_host_are_given_the_frame_itself():
    source = _source((FunctionTransformer(_doubled), ["i"])).fit(FRAME, Y)
    module = translate(source, FRAME)
    assert module.frontend.fallbacks == ("sklearn.preprocessing.FunctionTransformer",)
    _check(source, module, FRAME)


def test_numbers_by_name_and_without():
    numbers = FRAME.select("n", "i")
    source = make_pipeline(SimpleImputer(), Ridge()).fit(numbers.to_pandas(), Y)
    np.testing.assert_allclose(translate(source).predict(numbers), source.predict(numbers), atol=1e-12)
    trees = LGBMRegressor(n_estimators=3, verbose=-1).fit(numbers.to_numpy(), Y)
    np.testing.assert_allclose(translate(trees).predict(numbers), trees.predict(numbers.to_numpy()), atol=1e-12)


def test_other_frames_are_refused():
    module = translate(_source().fit(FRAME, Y))
    with pytest.raises(InvalidInputError, match=r"LazyFrame.*collect\(\)"):
        module.predict(FRAME.lazy())
    with pytest.raises(InvalidInputError, match="lacks the columns"):
        module.predict(FRAME.drop("gap"))
    with pytest.raises(InvalidInputError, match="text where numbers belong"):
        module.predict(FRAME.with_columns(n=pl.lit("many")))
