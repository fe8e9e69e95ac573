"""Encoders answer as scikit-learn does on any categories, and train as embeddings."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.estimators import BinaryEncoder, HashEncoder, TwoHotEncoder
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import KBinsDiscretizer, OneHotEncoder, OrdinalEncoder, StandardScaler, TargetEncoder

TEXT = np.array([["b", "x"], ["a", "y"], ["c", "x"], ["a", "z"], ["a", "x"]], dtype=object)
UNSEEN = np.array([["b", "z"], ["new", "y"], ["a", None], ["a", ""], [np.nan, "x"]], dtype=object)


@pytest.fixture
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    text = rng.choice(["red", "green", "blue", "rare", "rarer"], 200, p=[0.4, 0.3, 0.25, 0.03, 0.02]).astype(object)
    text[::17] = None
    return pd.DataFrame(
        {
            "text": text,
            "whole": rng.integers(-3, 4, 200),
            "real": np.where(rng.random(200) < 0.1, np.nan, rng.integers(0, 3, 200) / 2),
            "flag": rng.random(200) < 0.5,
            "category": pd.Categorical(rng.choice(["u", "v"], 200)),
        }
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sparse_output": False, "dtype": np.float32},
        {"drop": "first"},
        {"drop": "if_binary"},
        {"drop": ["green", 0, np.nan, True, "v"]},
        {"handle_unknown": "infrequent_if_exist", "min_frequency": 20},
        {"max_categories": 3, "drop": "first"},
        {"min_frequency": 0.2, "handle_unknown": "ignore"},
        {"min_frequency": 90, "drop": "first", "handle_unknown": "infrequent_if_exist"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Found unknown")
@pytest.mark.filterwarnings("ignore:unknown categories")
def test_one_hot(same_answers, frame, options):
    source = OneHotEncoder(**options).fit(frame)
    same_answers(source, frame)
    same_answers(source, frame[:1])
    if "handle_unknown" in options:
        same_answers(source, frame.assign(text="violet", whole=99, real=0.7))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": np.int64, "encoded_missing_value": -5},
        {"handle_unknown": "use_encoded_value", "unknown_value": -1},
        {"handle_unknown": "use_encoded_value", "unknown_value": np.nan, "encoded_missing_value": -2},
        {"max_categories": 2, "handle_unknown": "use_encoded_value", "unknown_value": 77},
        {"min_frequency": 30, "encoded_missing_value": 50},
    ],
    ids=str,
)
def test_ordinal(same_answers, frame, options):
    source = OrdinalEncoder(**options).fit(frame)
    same_answers(source, frame)
    same_answers(source, frame[-1:])
    if "unknown_value" in options:
        same_answers(source, frame.assign(text="violet", whole=99, real=0.7))


@pytest.mark.parametrize("target_type", ["binary", "multiclass", "continuous"])
@pytest.mark.parametrize("smooth", ["auto", 5.0])
def test_target(same_answers, frame, target_type, smooth):
    target = frame.whole.to_numpy() + frame.flag
    if target_type != "continuous":
        target = np.array(["low", "middle", "high"])[np.clip(target, -1, 0 if target_type == "binary" else 1) + 1]
    source = TargetEncoder(smooth=smooth).fit(frame, target + 0.25 if target_type == "continuous" else target)
    assert source.target_type_ == target_type
    same_answers(source, frame)
    same_answers(source, frame[:1])
    same_answers(source, frame.assign(text="violet", whole=99, real=0.7))


@pytest.mark.parametrize("encode", ["onehot", "onehot-dense", "ordinal"])
@pytest.mark.parametrize("strategy", ["uniform", "quantile", "kmeans"])
@pytest.mark.parametrize("dtype", [None, np.float32])
def test_bins_with_values_on_their_edges(same_answers, encode, strategy, dtype):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 3)) ** 3
    source = KBinsDiscretizer([2, 5, 9], encode=encode, strategy=strategy, dtype=dtype).fit(x)
    edges = np.array([rng.choice(edges, 50) for edges in source.bin_edges_]).T
    module = same_answers(source, np.vstack([x, edges, edges + 1e-9, edges - 1e-9, [[1e30] * 3], [[-1e30] * 3]]))
    assert module.frontend.is_trivial, "bins are found in the network"
    same_answers(source, x[:1].astype(np.float32))


@pytest.mark.parametrize("encoder", [HashEncoder(3), BinaryEncoder(), BinaryEncoder(20), TwoHotEncoder(20)], ids=str)
def test_encoders_of_our_own(same_answers, frame, encoder):
    source = encoder.fit(frame)
    same_answers(source, frame)
    same_answers(source, frame[:1])
    unseen = frame.assign(text="violet", whole=np.arange(200), real=np.arange(200) / 3, category="w")
    same_answers(source, unseen)
    same_answers(source.fit(TEXT), UNSEEN)


def test_colliding_categories_have_rows_of_their_own_and_buckets_too():
    module = translate(HashEncoder(2).fit(TEXT))
    tables = module.network.output.tables
    assert [tuple(table.shape) for table in tables] == [(5, 2), (5, 2)]
    answers = module.transform(TEXT[:3])
    with torch.no_grad():
        tables[0][0] += 1.0  # "a" alone
    assert np.array_equal(module.transform(TEXT[:3])[:, :2], answers[:, :2] + [[0], [1], [0]])


@pytest.mark.parametrize("source", [OneHotEncoder(handle_unknown="ignore"), OneHotEncoder(handle_unknown="warn")])
def test_unknown_text_none_and_nan(same_answers, source):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_answers(source.fit(TEXT), UNSEEN)
        same_answers(source.fit(np.vstack([TEXT, UNSEEN])), UNSEEN[::-1])


def test_unknown_categories_are_refused_where_the_source_refuses(frame):
    module = translate(OneHotEncoder().fit(frame))
    with pytest.raises(InvalidInputError, match=r"column text has .* 'violet', 'mauve'; drop"):
        module.transform(frame.assign(text=["violet", "mauve"] * 100))
    with pytest.raises(InvalidInputError, match="column real"):
        module.transform(frame.assign(real=0.25))


def test_many_unknown_categories_make_a_short_message():
    module = translate(OrdinalEncoder().fit([["a"]]))
    with pytest.raises(InvalidInputError, match=r"'9' and 90 more;"):
        module.transform(np.array([[str(number)] for number in range(100)], dtype=object))


def test_unknown_categories_are_warned_of_where_the_source_warns():
    for options in ({"handle_unknown": "warn"}, {"handle_unknown": "ignore", "drop": "first"}):
        module = translate(OneHotEncoder(**options).fit(TEXT))
        with pytest.warns(UserWarning, match=r"columns \['1'\]"):
            module.transform(np.array([["a", "new"]], dtype=object))


def test_an_invalid_category_is_refused():
    module = translate(OrdinalEncoder().fit(TEXT))
    cells = np.empty((1, 2), dtype=object)
    cells[0, 0], cells[0, 1] = ["a"], "x"
    with pytest.raises(InvalidInputError, match="no category"):
        module.transform(cells)


@pytest.mark.parametrize("dtype", ["U3", "S3", object, np.int8, np.uint16, np.float32, bool])
def test_dtypes_of_arrays(same_answers, dtype):
    x = np.array([[1, 0], [0, 1], [1, 1], [7, 3]]).astype(dtype)
    same_answers(OneHotEncoder(sparse_output=False).fit(x), x)
    same_answers(OrdinalEncoder().fit(x), x)


@pytest.mark.parametrize("dtype", ["Int64", "Float64", "boolean", "string", "category"])
def test_dtypes_of_pandas(same_answers, dtype):
    values = pd.array([True, False, None, True], dtype="boolean").astype("Int64" if dtype != "boolean" else dtype)
    x = pd.DataFrame({"a": pd.Series(values).astype(dtype), "b": [1, 2, 1, 2]})
    if dtype == "string":
        x = x.fillna({"a": "gone"})  # scikit-learn cannot sort pandas' NA among text
    same_answers(OneHotEncoder().fit(x), x)


def test_dates_stay_with_their_encoder(same_answers):
    x = np.array([["2020-01-01"], ["2021-01-01"]], dtype="datetime64[ns]")
    source = make_pipeline(OneHotEncoder(), LogisticRegression()).fit(x, [0, 1])
    module = same_answers(source, x)
    assert module.frontend.fallbacks == ("sklearn.preprocessing.OneHotEncoder",)


def test_given_categories_keep_their_order(same_answers):
    x = np.array([["low"], ["high"], ["mid"]], dtype=object)
    same_answers(OrdinalEncoder(categories=[["low", "mid", "high"]]).fit(x), x)
    same_answers(OneHotEncoder(categories=[["low", "mid", "high", "never"]]).fit(x), x)


def test_a_column_with_one_category(same_answers):
    x = np.array([["a", "b"], ["a", "c"]], dtype=object)
    same_answers(OneHotEncoder(drop="first").fit(x), x)
    same_answers(OneHotEncoder().fit(x[:1]), x[:1])


def test_encoders_within_a_pipeline_are_trained(same_answers, frame):
    numbers = make_pipeline(StandardScaler())
    columns = ColumnTransformer(
        [
            ("one-hot", OneHotEncoder(handle_unknown="ignore"), ["text", "category"]),
            ("numbers", numbers, ["whole"]),
            ("ordinal", OrdinalEncoder(), ["flag"]),
        ]
    )
    target = np.where((frame.text == "red") ^ frame.flag, "yes", "no")
    source = make_pipeline(columns, LogisticRegression()).fit(frame, target)
    module = same_answers(source, frame)
    table = next(part for part in module.modules() if type(part).__name__ == "CategoryEmbedding").tables[0]
    assert table.shape == (7, 6)  # five colours, None, and what is unknown
    assert table.grad is not None
    assert (table.grad[:6].abs().sum(1) > 0).all()
    assert not table.grad[6].any(), "no unknown category came"


def test_infrequent_categories_can_be_trained_apart(frame):
    module = translate(OneHotEncoder(min_frequency=20).fit(frame[["text"]]))
    table = module.network.output.tables[0]
    rows = module.encode(pd.DataFrame({"text": ["rare", "rarer"]}))[:, 0].astype(int)
    assert rows[0] != rows[1]
    assert torch.equal(table[rows[0]], table[rows[1]])


def test_a_module_with_embeddings_is_exported():
    module = translate(OneHotEncoder(handle_unknown="ignore").fit(TEXT))
    packed = torch.from_numpy(module.encode(UNSEEN))
    exported = torch.export.export(module, (packed,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert torch.equal(exported.module()(packed[:3]), module(packed[:3]))


def test_a_look_up_is_loaded_without_scikit_learn_or_pandas(answer_alone):
    source = make_pipeline(OneHotEncoder(handle_unknown="ignore"), LogisticRegression()).fit(TEXT, [0, 1, 0, 1, 1])
    np.testing.assert_allclose(answer_alone(translate(source), UNSEEN), source.predict_proba(UNSEEN), atol=1e-12)


def test_a_table_too_large_to_embed_stays_with_its_encoder(monkeypatch):
    monkeypatch.setattr("mlsys_windtunnel.convert.encode.MAX_TABLE_NBYTES", 8 * 8)
    with pytest.raises(InvalidInputError, match=r"OneHotEncoder declines \d+ categories in column 0"):
        translate(OneHotEncoder().fit(TEXT))
    translate(OneHotEncoder().fit(TEXT[:2]))


COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "text": st.text("abc", max_size=2),
    "text or none": st.text("ab", max_size=1) | st.none(),
    "text or nan": st.text("ab", max_size=1) | st.just(float("nan")),
    "text, none or nan": st.sampled_from(["a", "b", None, float("nan")]),
    "whole": st.integers(-3, 3),
    "real or nan": st.sampled_from([0.0, -0.0, 0.1, 1e300, -2.5, float("nan")]),
    "flag": st.booleans(),
}


@st.composite
def frames(draw: st.DrawFn) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A frame to fit on and one to answer for, whose cells may be unseen."""
    kinds = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=3))
    return tuple(
        pd.DataFrame(
            {
                f"{index} {kind}": pd.Series(
                    draw(st.lists(COLUMNS[kind], min_size=rows, max_size=rows)),
                    dtype=object if "text" in kind else None,
                )
                for index, kind in enumerate(kinds)
            }
        )
        for rows in (draw(st.integers(2, 12)), draw(st.integers(1, 8)))
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), pair=frames())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_frame_is_encoded_as_the_source_does(same_answers, data, pair):
    seen, unseen = pair
    encoders = [
        OneHotEncoder(
            handle_unknown=data.draw(st.sampled_from(["ignore", "infrequent_if_exist", "warn"])),
            drop=data.draw(st.sampled_from([None, "first", "if_binary"])),
            min_frequency=data.draw(st.sampled_from([None, 2])),
            max_categories=data.draw(st.sampled_from([None, 1, 2])),
        ),
        OrdinalEncoder(
            handle_unknown="use_encoded_value",
            unknown_value=data.draw(st.sampled_from([-1, np.nan])),
            encoded_missing_value=data.draw(st.sampled_from([-2, np.nan])),
            max_categories=data.draw(st.sampled_from([None, 2])),
        ),
    ]
    target = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(seen), max_size=len(seen))))
    if len(np.unique(target)) > 1:
        encoders.append(TargetEncoder(smooth=data.draw(st.sampled_from(["auto", 0.0, 3.0]))))
    for encoder in encoders:
        source = encoder.fit(seen, target)
        for x in (seen, unseen, seen[::-1]):
            same_answers(source, x, trained=False)
