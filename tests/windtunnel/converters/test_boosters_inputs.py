"""XGBoost's and CatBoost's own manner with tables: what they refuse the translation refuses, the rest it answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.ensemble import VotingRegressor
from sklearn.pipeline import make_pipeline

X = np.random.default_rng(0).normal(size=(100, 3))
FRAME = pd.DataFrame(X, columns=list("abc"))
ROWS, NAMED = X[:4], FRAME[:4]
FITS: dict[str, Any] = {
    "array": X,
    "names": FRAME,
    "numbers": pd.DataFrame(X),
    "array in a pipeline": X,
    "names in a pipeline": FRAME,
}
SPECIAL = np.where(np.eye(4, 3, dtype=bool), np.array([[np.inf], [-np.inf], [np.nan], [1e300]]), ROWS)
TABLES: dict[str, Any] = {
    "array": ROWS,
    "inf": SPECIAL,
    "inf of float32": SPECIAL.astype(np.float32),
    "names": NAMED,
    "inf by name": pd.DataFrame(SPECIAL, columns=list("abc")),
    "reversed": NAMED[list("cba")],
    "more behind": NAMED.assign(z=1.0),
    "more before": NAMED.assign(z=1.0)[list("zabc")],
    "fewer": NAMED[["a", "b"]],
    "others": NAMED.rename(columns={"a": "q"}),
    "numbers": pd.DataFrame(ROWS),
    "numbers reversed": pd.DataFrame(ROWS)[[2, 1, 0]],
    "some names": NAMED.rename(columns={"a": 0}),
    "categories": NAMED.assign(a=pd.Categorical([1, 2, 1, 3])),
}
# They are answered, and the translation refuses them by these words: codes of categories where there were numbers, and
# columns behind those of an array.
STRICTER = {
    ("xgboost", "array", "categories"): "were not of dtype category",
    ("xgboost", "names", "categories"): "were not of dtype category",
    ("catboost", "array", "more behind"): "is expecting 3 features",
    ("catboost", "array", "more before"): "is expecting 3 features",
}


def booster(package: str) -> Any:
    if package == "xgboost":
        return pytest.importorskip("xgboost").XGBRegressor(n_estimators=3, n_jobs=1)
    options = {"n_estimators": 3, "verbose": 0, "allow_writing_files": False, "thread_count": 1}
    return pytest.importorskip("catboost").CatBoostRegressor(**options)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("package", ["xgboost", "catboost"])
def test_each_table_is_answered_alike_or_refused(package: str, fit: str):
    source = booster(package)
    source = make_pipeline(source) if "pipeline" in fit else source
    source.fit(FITS[fit], X[:, 0])
    module = translate(source)
    for name, table in TABLES.items():
        try:
            expected = source.predict(table)
        except Exception:  # noqa: BLE001  of three libraries
            with pytest.raises(InvalidInputError):
                module.predict(table)
            continue
        refusal = STRICTER.get((package, fit.partition(" ")[0], name))
        if refusal is not None:
            with pytest.raises(InvalidInputError, match=refusal):
                module.predict(table)
        else:
            np.testing.assert_allclose(module.predict(table), expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_names_reach_the_members_of_a_vote():
    source = VotingRegressor([("one", booster("catboost")), ("two", booster("catboost"))]).fit(FRAME, X[:, 0])
    module = translate(source)
    np.testing.assert_allclose(module.predict(NAMED[list("cba")]), source.predict(NAMED[list("cba")]), rtol=1e-6)


@pytest.mark.parametrize("package", ["xgboost", "catboost"])
def test_only_columns_that_were_categories_may_be(package: str):
    fitted = FRAME.assign(b=pd.Categorical(np.arange(100) % 3))
    options = {"enable_categorical": True} if package == "xgboost" else {"cat_features": ["b"]}
    source = booster(package).set_params(**options).fit(fitted, X[:, 0])
    module = translate(source)
    np.testing.assert_allclose(module.predict(fitted), source.predict(fitted), rtol=1e-5, atol=1e-6)
    for table in (fitted.assign(a=pd.Categorical(np.arange(100) % 3)), fitted.drop(columns="b")):
        with pytest.raises(Exception, match=r"."):
            source.predict(table)
        with pytest.raises(InvalidInputError):
            module.predict(table)
