"""CatBoost's own manner with tables: what it refuses the translation refuses, the rest it answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlsys_windtunnel.convert.translation import translate
from sklearn.ensemble import VotingRegressor

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
