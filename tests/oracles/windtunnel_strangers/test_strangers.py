"""What the oracle of strangers' pipelines has found; ``full.py`` runs all of it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import translate
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, TargetEncoder

FRAME = pd.DataFrame({"a": [1.0, 2, 3, 4], "b": [1, 2, 3, 5], "c": pd.Series(["x", "y", None, "x"], dtype=object)})
NUMBERS = ["a", "b"]


@pytest.mark.parametrize("repeats", [1, 30])
def test_na_among_objects_is_no_number_and_that_of_a_nullable_column_is_missing(repeats: int):
    table = pd.concat([FRAME[NUMBERS]] * repeats, ignore_index=True)
    source = make_pipeline(SimpleImputer(), Ridge()).fit(table, table.a)
    module = translate(source)
    nullable = table.assign(b=table.b.astype("Int64").mask(table.b == 3))
    np.testing.assert_allclose(module.predict(nullable), source.predict(nullable))
    objects = table.assign(b=table.b.astype(object).where(table.b != 3, pd.NA))
    with pytest.raises(TypeError, match="NAType"):
        source.predict(objects)
    with pytest.raises(InvalidInputError, match="NAType"):
        module.predict(objects)


def test_na_that_a_column_transformer_passes_through_is_refused():
    columns = make_column_transformer((SimpleImputer(), ["b"]), remainder="passthrough")
    table = FRAME[NUMBERS]
    source = make_pipeline(columns, HistGradientBoostingClassifier(max_iter=2)).fit(table, [0, 1, 0, 1])
    module = translate(source)
    whole = table.convert_dtypes(dtype_backend="pyarrow")
    np.testing.assert_allclose(module.predict_proba(whole), source.predict_proba(whole))
    for answering, error in ((source, ValueError), (module, InvalidInputError)):
        with pytest.raises(error, match=r"uses pandas.NA to represent null values"):
            answering.predict(whole.assign(a=whole.a.mask(table.a == 2)))


def test_none_in_a_frame_between_steps_is_refused_since_pandas_reads_it_by_its_neighbours():
    words = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(sparse_output=False))
    source = make_pipeline(words, Ridge()).set_output(transform="pandas").fit(FRAME[["c"]], FRAME.a)
    module = translate(source)
    filled = FRAME[["c"]].fillna("x")
    np.testing.assert_allclose(module.predict(filled), source.predict(filled))
    with pytest.raises(InvalidInputError, match="pass NaN where a text is missing"):
        module.predict(FRAME[["c"]])


def _days(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({"days": (frame["since"] - pd.Timestamp("2024-01-01")).dt.days})


def test_a_function_of_the_users_own_may_read_dates():
    dates = pd.DataFrame({"since": pd.Timestamp("2024-01-01") + pd.to_timedelta([3, 5, 9, 20], unit="D")})
    source = make_pipeline(FunctionTransformer(_days), Ridge()).fit(dates, [1.0, 2, 3, 4])
    np.testing.assert_allclose(translate(source, dates).predict(dates), source.predict(dates))


@pytest.mark.parametrize("repeats", [1, 40])
def test_na_is_no_category_of_encoders_unless_it_is_among_numbers(repeats: int):
    number = np.array([1.0, 2.0, np.nan] * 10)
    word = np.array(["a", "b", np.nan] * 10, object)
    gaps = {
        "n": [pd.array([1, None, 9], dtype=kind) for kind in ("Int64", "Float64", "int64[pyarrow]", object)]
        + [pd.array([1, pd.NA, 9], dtype=object), pd.array([True, None, False], dtype="boolean")],
        "w": [pd.array(["a", None, "z"], dtype=kind) for kind in ("string", "str", "category", "string[pyarrow]")]
        + [pd.array(cells, dtype=object) for cells in (["a", pd.NA, "z"], ["a", np.nan, "z"], ["a", None, "z"])],
    }
    for name, column in (("n", number), ("w", word)):
        table = pd.DataFrame({name: column})
        for encoder in (
            TargetEncoder(random_state=0).fit(table, np.arange(30.0)),
            OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(table),
            OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1).fit(table),
        ):
            module = translate(encoder)
            for gap in gaps[name]:
                asked = pd.DataFrame({name: pd.concat([pd.Series(gap)] * repeats, ignore_index=True)})
                expected = encoder.transform(asked)
                np.testing.assert_allclose(module.transform(asked), expected, err_msg=str(gap))


def test_numbers_before_an_encoder_of_texts_are_refused_as_the_source_refuses_them() -> None:
    table = pd.DataFrame({"w": pd.Series(["a", "b", None] * 4, dtype=object)})
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(table)
    module = translate(encoder)
    for cells in ([np.nan, np.nan], [1, 2], pd.array([1, None], dtype="Int64"), pd.array([1, 2], dtype="Int64")):
        asked = pd.DataFrame({"w": cells})
        with pytest.raises(TypeError, match="isnan"):
            encoder.transform(asked)
        with pytest.raises(InvalidInputError, match="fitted on texts or objects"):
            module.transform(asked)
        objects = asked.astype(object)
        np.testing.assert_allclose(module.transform(objects), encoder.transform(objects))
