"""Tables as users have them: frames of all dtypes, mappings from names to columns, arrays of objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler

ROWS = 200  # many enough for pandas' own search of distinct values
rng = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "n": rng.normal(size=ROWS),
        "i": rng.integers(0, 9, ROWS),
        "word": rng.choice(["a", "b", "c"], ROWS),
        "gap": rng.choice(np.array(["a", "b", None], object), ROWS),
    }
)
Y = np.where(FRAME.n > 0, "yes", "no")


def pipeline(**options: Any) -> Any:
    encoder = OneHotEncoder(**{"handle_unknown": "ignore"} | options)
    columns = make_column_transformer((StandardScaler(), ["n", "i"]), (encoder, ["word", "gap"]))
    return make_pipeline(columns, LogisticRegression())


SOURCE = pipeline().fit(FRAME, Y)
MODULE = translate(SOURCE)


def columns_of(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    return {name: frame[name].to_numpy() for name in frame}


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("dtypes", [{}, {"word": object}, {"word": "category"}, {"i": "Int64", "n": "Float64"}])
def test_frames_of_any_dtype(rows: int, dtypes: dict[str, Any]):
    frame = FRAME[:rows].astype(dtypes)
    np.testing.assert_allclose(MODULE.predict_proba(frame), SOURCE.predict_proba(frame), rtol=0, atol=1e-12)
    reordered = frame[["gap", "word", "i", "n"]].assign(more=1)
    np.testing.assert_array_equal(MODULE.predict_proba(reordered), MODULE.predict_proba(frame))


@pytest.mark.parametrize("dtype", ["str", "category", object])
def test_unknown_and_missing_text(dtype: Any):
    source = pipeline().fit(FRAME[:3], Y[:3])  # knows but few of the categories
    frame = FRAME.assign(word=FRAME.word.where(FRAME.n > 0, np.nan)).astype({"word": dtype})
    got, expected = translate(source).predict_proba(frame), source.predict_proba(frame)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    strict = translate(pipeline(handle_unknown="error").fit(FRAME, Y))
    with pytest.raises(InvalidInputError, match=r"column word has categories.*'zebra'"):
        strict.predict(FRAME.assign(word="zebra").astype({"word": dtype}))


def test_missing_integers_become_nan_unless_they_pass_into_an_array():
    source = make_pipeline(OrdinalEncoder()).fit(FRAME[["i"]].astype(float))
    imputed = make_column_transformer((SimpleImputer(), ["i", "n"])).fit(FRAME[["i", "n"]])
    frame = FRAME.assign(i=FRAME.i.astype("Int64").where(FRAME.n > 0))
    np.testing.assert_allclose(translate(imputed).transform(frame), imputed.transform(frame))
    passed = make_column_transformer(("passthrough", ["i", "n"])).fit(FRAME[["i", "n"]])
    with pytest.raises(ValueError, match=r"pandas\.NA"):
        passed.transform(frame)
    with pytest.raises(InvalidInputError, match=r"pandas\.NA"):
        translate(passed).transform(frame)
    assert translate(source).transform(FRAME[["i"]]).shape == (ROWS, 1)


@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_mapping_of_columns_is_a_table(rows: int):
    expected = MODULE.predict_proba(FRAME[:rows])
    columns = columns_of(FRAME[:rows])
    np.testing.assert_array_equal(MODULE.predict_proba(columns), expected)
    np.testing.assert_array_equal(MODULE.predict_proba({n: c.reshape(-1, 1) for n, c in columns.items()}), expected)
    lists = {name: column.tolist() for name, column in columns.items()} | {"more": "looked at by nobody"}
    np.testing.assert_array_equal(MODULE.predict_proba({"n": lists.pop("n"), **lists}), expected)
    assert (MODULE.predict(columns) == SOURCE.predict(FRAME[:rows])).all()
    np.testing.assert_array_equal(MODULE.encode(columns), MODULE.encode(FRAME[:rows]))


def test_a_mapping_reaches_fallback_operators_as_a_frame():
    fallback = FunctionTransformer(lambda frame: frame.assign(n=frame.n.abs())[["n"]])
    source = make_pipeline(make_column_transformer((fallback, ["n", "i"])), LogisticRegression()).fit(FRAME, Y)
    module = translate(source, FRAME)
    np.testing.assert_allclose(module.predict_proba(columns_of(FRAME)), source.predict_proba(FRAME), rtol=0, atol=1e-12)


def test_bad_columns_are_refused():
    columns = columns_of(FRAME)
    with pytest.raises(InvalidInputError, match=r"lacks the columns \['gap'\]; the pipeline was fitted on \['n', 'i'"):
        MODULE.predict({name: column for name, column in columns.items() if name != "gap"})
    with pytest.raises(InvalidInputError, match=r"'i' has shape \(3,\); a cell for each of the 200 rows"):
        MODULE.predict(columns | {"i": columns["i"][:3]})
    with pytest.raises(InvalidInputError, match=r"Expected unique column names, got \['i'\] more than once"):
        MODULE.predict(pd.concat([FRAME, FRAME[["i"]]], axis=1))
    with pytest.raises(InvalidInputError, match="text where numbers belong"):
        MODULE.predict(columns | {"n": columns["word"]})
    with pytest.raises(InvalidInputError, match="no rows"):
        MODULE.predict({name: column[:0] for name, column in columns.items()})
    with pytest.raises(InvalidInputError, match="lacks the columns"):
        MODULE.predict({})
    unnamed = translate(LogisticRegression().fit(FRAME[["n"]].to_numpy(), Y))
    with pytest.raises(InvalidInputError, match="shape"):
        unnamed.predict({"n": columns["n"]})


def test_one_row_as_a_mapping_to_values_is_refused_and_says_how_to_write_it():
    with pytest.raises(InvalidInputError, match=r"is one value: give columns as lists"):
        MODULE.predict({name: column[0] for name, column in columns_of(FRAME).items()})


def test_histograms_that_take_categories_from_a_frame_look_columns_up_by_name():
    table = pd.DataFrame({"a": np.arange(40.0), "k": pd.Categorical(list("uv") * 20)})
    source = HistGradientBoostingRegressor(max_iter=3, categorical_features="from_dtype").fit(table, table.a)
    for asked in (table[["k", "a"]], table.assign(more=1)):
        np.testing.assert_allclose(translate(source).predict(asked), source.predict(asked))


def test_what_is_missing_in_a_mapping_is_what_it_is_in_a_frame_of_it():
    texts = pd.DataFrame({"n": [1.0, 2, 3] * 9, "word": pd.Series(["a", "b", np.nan] * 9, dtype="str")})
    columns = make_column_transformer((OneHotEncoder(), ["word"]), (SimpleImputer(), ["n"]))
    source = make_pipeline(columns, LogisticRegression()).fit(texts, texts.n > 1)
    asked = {"n": [None, 2], "word": ["b", None]}
    given = pd.DataFrame({"n": [np.nan, 2], "word": ["b", np.nan]})
    for each in (asked, {name: np.array(cells, object) for name, cells in asked.items()}):
        np.testing.assert_allclose(translate(source).predict_proba(each), source.predict_proba(given))
