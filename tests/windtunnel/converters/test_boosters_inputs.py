"""XGBoost's own manner with tables: what it refuses the translation refuses, the rest it answers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.windtunnel.booster_tables import FITS, check_categories, check_each_table

# They are answered, and the translation refuses them by these words: codes of categories where there were numbers.
STRICTER = {
    ("array", "categories"): "were not of dtype category",
    ("names", "categories"): "were not of dtype category",
}


def booster(**options: Any) -> Any:
    return pytest.importorskip("xgboost").XGBRegressor(n_estimators=3, n_jobs=1, **options)


@pytest.mark.parametrize("fit", FITS)
def test_each_table_is_answered_alike_or_refused(fit: str):
    check_each_table(booster(), fit, STRICTER)


def test_only_columns_that_were_categories_may_be():
    check_categories(booster(enable_categorical=True))
