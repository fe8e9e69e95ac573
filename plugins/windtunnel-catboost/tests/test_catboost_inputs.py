"""CatBoost's own manner with tables: what it refuses the translation refuses, the rest it answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlsys_windtunnel.convert.translation import translate
from sklearn.ensemble import StackingRegressor, VotingRegressor
from sklearn.linear_model import Ridge
from sklearn.multioutput import RegressorChain

from tests.windtunnel.booster_tables import FITS, FRAME, NAMED, X, check_categories, check_each_table

# They are answered, and the translation refuses them by these words: columns behind those of an array.
STRICTER = {
    ("array", "more behind"): "is expecting 3 features",
    ("array", "more before"): "is expecting 3 features",
}


def booster(**options: Any) -> Any:
    catboost = pytest.importorskip("catboost")
    return catboost.CatBoostRegressor(n_estimators=3, verbose=0, allow_writing_files=False, thread_count=1, **options)


@pytest.mark.parametrize("fit", FITS)
def test_each_table_is_answered_alike_or_refused(fit: str):
    check_each_table(booster(), fit, STRICTER)


def test_names_reach_the_members_of_a_vote():
    source = VotingRegressor([("one", booster()), ("two", booster())]).fit(FRAME, X[:, 0])
    module = translate(source)
    np.testing.assert_allclose(module.predict(NAMED[list("cba")]), source.predict(NAMED[list("cba")]), rtol=1e-6)


def test_only_columns_that_were_categories_may_be():
    check_categories(booster(cat_features=["b"]))


def test_a_regressor_is_a_member_of_a_stack_and_of_a_chain():
    target = np.column_stack([X[:, 0], X[:, 1]])
    stack = StackingRegressor([("one", booster()), ("two", Ridge())], booster(), cv=2, passthrough=True)
    for source in (stack.fit(X, X[:, 0]), RegressorChain(booster()).fit(X, target)):
        np.testing.assert_allclose(translate(source).predict(X), source.predict(X), rtol=1e-6)
    np.testing.assert_allclose(translate(stack).transform(X), stack.transform(X), rtol=1e-6)
