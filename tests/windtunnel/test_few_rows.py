"""A dictionary of a few rows is answered, or refused, as the same frame: the planned reader never decides alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.host.few_rows import FewRows
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "age": np.where(RNG.random(90) < 0.2, np.nan, RNG.normal(40, 9, 90)),
        "fare": RNG.gamma(2.0, 9.0, 90),
        "city": RNG.choice(["Bern", "Oslo", "Rome"], 90),
        "size": RNG.choice([1, 2, 5], 90),
        "kind": RNG.choice(np.array(["a", "b", None], object), 90),
    }
)
NUMBERS = make_pipeline(SimpleImputer(), StandardScaler())


@pytest.fixture(scope="module")
def module() -> Any:
    """A pipeline over numbers, texts, categories that are numbers, and None as a category."""
    columns = make_column_transformer(
        (NUMBERS, ["age", "fare"]),
        (OneHotEncoder(handle_unknown="ignore"), ["city", "kind"]),
        (OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1), ["size"]),
    )
    labels = np.where(FRAME.fare + 9 * (FRAME.city == "Rome") > 20, "stay", "go")
    return translate(make_pipeline(columns, LogisticRegression()).fit(FRAME, labels))


def _columns(frame: pd.DataFrame) -> dict[str, Any]:
    return {name: frame[name].to_numpy() for name in frame.columns}


def _by_frame(module: Any, columns: dict[str, Any]) -> Any:
    return module.predict_proba(pd.DataFrame(columns))


@pytest.mark.parametrize("rows", [1, 2, 64, 65])
def test_rows_are_answered_as_a_frame(module, rows):
    np.testing.assert_array_equal(module.predict_proba(_columns(FRAME[:rows])), module.predict_proba(FRAME[:rows]))


def test_the_planned_reader_is_used(module):
    assert module.frontend._few_rows()(_columns(FRAME[:1])) is not None
    assert module.frontend._few_rows()(_columns(FRAME)) is None, "more rows are read column by column"


@pytest.mark.parametrize(
    "change",
    [
        {"city": np.array(["Paris"], object)},  # unknown
        {"city": np.array(["Rome"])},  # of a fixed width
        {"kind": np.array([np.nan], object)},
        {"age": np.array([41], np.int8)},
        {"age": np.array([True])},
        {"fare": np.array([3.5], np.float16)},
        {"age": np.array([41.5], object)},
        {"size": np.array([2.0])},
        {"size": np.array([7])},
        {"age": np.array([[41.0]])},  # [rows, 1]
        {"age": [41.0]},  # a list
        {"another": np.array([1.0])},
    ],
    ids=str,
)
def test_other_columns_are_answered_as_a_frame(module, change):
    columns = _columns(FRAME[:1]) | change
    flat = {name: np.asarray(each).reshape(-1) for name, each in columns.items()}
    np.testing.assert_array_equal(module.predict_proba(columns), _by_frame(module, flat))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"age": np.array(["old"])}, "text where numbers belong"),
        ({"age": np.array(["2024-01-01"], "M8[D]")}, "dates where numbers belong"),
        ({"city": np.array([["Rome", "Oslo"]], object)}, "column 'city' has shape"),
        ({"fare": np.array([1.0, 2.0])}, "has shape"),
        ({"fare": np.array([np.inf])}, "infinity"),
    ],
    ids=str,
)
def test_what_is_refused_stays_refused(module, change, reason):
    with pytest.raises(InvalidInputError, match=reason):
        module.predict_proba(_columns(FRAME[:1]) | change)


def test_a_list_in_a_cell_is_refused(module):
    cell = np.empty(1, object)
    cell[0] = ["Rome"]
    with pytest.raises(InvalidInputError, match="a cell is no category"):
        module.predict_proba(_columns(FRAME[:1]) | {"city": cell})


def test_a_missing_column_is_named(module):
    columns = _columns(FRAME[:1])
    del columns["fare"]
    with pytest.raises(InvalidInputError, match=r"lacks the columns \['fare'\]"):
        module.predict_proba(columns)


def test_no_rows_are_refused(module):
    with pytest.raises(InvalidInputError, match="0 sample"):
        module.predict_proba(_columns(FRAME[:0]))


def test_copies_and_files_hold_no_reader(module, tmp_path):
    row = _columns(FRAME[:1])
    expected = module.predict_proba(row)
    assert "_few" not in module.frontend.__getstate__()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), load(save(module, tmp_path))):
        assert vars(other.frontend).get("_few") is not module.frontend._few_rows()
        np.testing.assert_array_equal(other.predict_proba(row), expected)


def test_one_column_alone():
    assert FewRows([(["a"], None)])({"a": np.array([1.0])})[0].tolist() == [[1.0]]
