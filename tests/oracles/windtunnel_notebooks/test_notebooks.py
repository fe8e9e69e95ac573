"""The bounded part: every fourth pipeline, on a tenth of the damaged tables, and what the whole has found."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from lightgbm import LGBMRegressor
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import translate
from sklearn.compose import ColumnTransformer, make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from tests.oracles.tally import Tally
from tests.oracles.windtunnel_notebooks import full

TABLE = pd.DataFrame({"a": np.arange(20.0), "b": np.arange(20.0) % 3, "word": ["x", "y"] * 10})
TARGET = TABLE.a + TABLE.b


def test_pipelines_of_notebooks_are_exact() -> None:
    tally = Tally()
    names = list(full.CASES)[::4]
    assert full.run(names, tally, every=10) == names
    assert not tally.faults, tally.faults[:20]
    assert tally.counts["equal"] > 100


def test_a_column_that_no_part_reads_may_be_missing() -> None:
    columns = make_column_transformer((SimpleImputer(), ["a"]), (StandardScaler(), ["b"]))
    source = make_pipeline(columns, Ridge()).fit(TABLE, TARGET)
    module, few = translate(source), TABLE[["b", "a"]]
    np.testing.assert_allclose(module.predict(few), source.predict(few))
    np.testing.assert_allclose(module.predict(few.to_dict("list")), source.predict(few))
    with pytest.raises(InvalidInputError, match=r"lacks the columns \['a'\]"):
        module.predict(TABLE[["b", "word"]])


def test_columns_of_a_frame_that_a_function_made_are_looked_up_by_name() -> None:
    columns = ColumnTransformer([("a", StandardScaler(), ["a"]), ("more", "passthrough", ["more"])])
    source = make_pipeline(FunctionTransformer(_with_more), columns, Ridge()).fit(TABLE, TARGET)
    module = translate(source, TABLE[:3])
    for asked in (TABLE[["word", "b", "a"]], TABLE.assign(extra="z"), TABLE.drop(columns="word")):
        np.testing.assert_allclose(module.predict(asked), source.predict(asked))
    for gone in ("a", "b"):
        with pytest.raises(InvalidInputError):
            module.predict(TABLE.drop(columns=gone))


def _with_more(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(more=2 * frame["b"])


def test_objects_in_a_frame_that_a_column_transformer_hands_to_lightgbm_are_refused() -> None:
    columns = ColumnTransformer([("a", StandardScaler(), ["a"])], remainder="passthrough")
    numbers = TABLE[["a", "b"]]
    model = LGBMRegressor(n_estimators=2, min_child_samples=2, verbose=-1)
    source = make_pipeline(columns.set_output(transform="pandas"), model).fit(numbers, TARGET)
    module = translate(source)
    np.testing.assert_allclose(module.predict(numbers.astype({"a": object})), source.predict(numbers))
    with pytest.raises(InvalidInputError, match="not of objects"):
        module.predict(numbers.astype({"b": object}))
