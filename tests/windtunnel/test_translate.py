"""Translation as a whole: the cut between host and network, wiring, inputs of all kinds, refusals."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_windtunnel.convert.registry import ConverterRegistry, Entry, converters
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.modules.linear.linear import Affine
from mlsys_windtunnel.parse import boosters, libraries, names
from sklearn.base import BaseEstimator, RegressorMixin, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler


@pytest.fixture
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {"a": rng.normal(size=120), "b": rng.normal(2, 3, size=120), "c": rng.choice(["x", "y", "z"], 120)}
    )


@pytest.fixture
def target(frame: pd.DataFrame) -> np.ndarray:
    return np.where(frame.a + (frame.c == "x") > 0, "yes", "no")


class Shout(TransformerMixin, BaseEstimator):
    """A transformer of the user's own: text lengths, which nothing can translate."""

    def fit(self, x, y=None):
        self.fitted_ = True
        return self

    def transform(self, x):
        return np.asarray([[len(str(cell)) for cell in row] for row in np.asarray(x)], float)


def test_a_nested_pipeline_of_arithmetic_operators(same_answers, frame, target):
    x = frame[["a", "b"]].to_numpy()
    union = FeatureUnion([("s", StandardScaler()), ("p", "passthrough")], transformer_weights={"s": 3.0})
    source = make_pipeline(union, StandardScaler(), LogisticRegression()).fit(x, target)
    module = same_answers(source, x)
    assert module.frontend.is_trivial
    assert len(list(module.parameters())) == 7


def test_a_fallback_operator_runs_on_the_host_before_the_translated_part(same_answers, frame, target):
    columns = ColumnTransformer([("n", StandardScaler(), ["a", "b"]), ("t", Shout(), ["c"])])
    source = Pipeline([("columns", columns), ("model", LogisticRegression())]).fit(frame, target)
    module = same_answers(source, frame, with_example=True)
    assert module.frontend.fallbacks == (f"{Shout.__module__}.Shout",)
    assert any(type(part).__name__ == "ElementwiseAffine" for part in module.modules()), "the scaler is translated"


def test_operators_upstream_of_a_fallback_stay_on_the_host(same_answers, frame, target):
    x = frame[["a", "b"]].to_numpy()
    source = make_pipeline(StandardScaler(), FunctionTransformer(np.rint), LogisticRegression()).fit(x, target)
    module = same_answers(source, x, with_example=True)
    assert [type(part).__name__ for part in module.network.operators] == ["Classifier"]


def test_a_fallback_width_that_is_unknown_asks_for_an_example(frame, target):
    columns = ColumnTransformer([("t", Shout(), ["c"]), ("n", StandardScaler(), ["a"])])
    source = make_pipeline(columns, LogisticRegression()).fit(frame, target)
    with pytest.raises(InvalidInputError, match="pass X_example"):
        translate(source)


TEXTS = ["good day", "bad night", "fine day", "bad day"] * 30


@pytest.mark.parametrize("tokeniser", [TfidfVectorizer(), CountVectorizer(binary=True)])
def test_a_tokeniser_of_one_column_runs_on_the_host(same_answers, frame, target, tokeniser):
    frame = frame.assign(text=TEXTS)
    columns = ColumnTransformer([("t", tokeniser, "text"), ("n", StandardScaler(), ["a", "b"])])
    source = make_pipeline(columns, LogisticRegression()).fit(frame, target)
    module = same_answers(source, frame)
    assert module.frontend.fallbacks == (), "it is kept as data"
    columns = {name: frame[name].to_numpy() for name in frame}
    np.testing.assert_allclose(module.predict_proba(columns), source.predict_proba(frame), atol=1e-12)


def test_a_tokeniser_of_one_column_of_an_array_runs_on_the_host(same_answers, frame, target):
    x = frame[["a", "b"]].assign(text=TEXTS).to_numpy(object)
    columns = ColumnTransformer([("t", TfidfVectorizer(), 2), ("n", StandardScaler(), [0, 1])])
    same_answers(make_pipeline(columns, LogisticRegression()).fit(x, target), x)


@pytest.mark.parametrize("given", [list, np.array, pd.Series])
def test_a_pipeline_of_texts_takes_texts(same_answers, target, given):
    texts = given(TEXTS)
    module = same_answers(
        make_pipeline(TfidfVectorizer(), TruncatedSVD(2), LogisticRegression()).fit(texts, target), texts
    )
    assert module.predict(texts[:1]).shape == (1,)


def test_the_width_of_a_pipeline_that_begins_with_nothing_is_known(same_answers, frame, target):
    union = FeatureUnion([("dropped", "drop"), ("scaled", StandardScaler())])
    x = frame[["a", "b"]].to_numpy()
    same_answers(Pipeline([("none", None), ("union", union), ("model", LogisticRegression())]).fit(x, target), x)


def test_a_fallback_last_operator_is_refused_by_name(frame):
    with pytest.raises(InvalidInputError, match=r"no converter for .*Shout"):
        translate(make_pipeline(StandardScaler(), Shout()).fit(frame[["a"]]))


@pytest.mark.parametrize("bad", [StandardScaler(), "text", StandardScaler, None])
def test_an_unfitted_estimator_is_refused(bad):
    with pytest.raises(InvalidInputError, match="fitted"):
        translate(bad)


def test_numpy_pandas_sparse_and_lists_are_taken(frame, target):
    x = frame[["a", "b"]].to_numpy()
    source = make_pipeline(StandardScaler(with_mean=False), LogisticRegression()).fit(x, target)
    module = translate(source)
    expected = source.predict_proba(x)
    for given in (x, x.tolist(), scipy.sparse.csr_matrix(x), np.asfortranarray(x)):
        np.testing.assert_allclose(module.predict_proba(given), expected, atol=1e-9)


def test_columns_of_a_mapping_are_taken_by_name(frame):
    source = LinearRegression().fit(frame[["a", "b"]], frame.a)
    module = translate(source)
    columns = {name: frame[name].to_numpy() for name in ("c", "b", "a")}
    np.testing.assert_allclose(module.predict(columns), source.predict(frame[["a", "b"]]))
    with pytest.raises(InvalidInputError, match=r"lacks the columns \['b'\]"):
        module.predict({"a": columns["a"]})


@pytest.mark.parametrize("bad", [np.zeros((2, 3)), np.zeros(2), np.zeros((0, 2))])
def test_wrong_shapes_are_refused(bad):
    module = translate(LinearRegression().fit([[0.0, 1], [1, 0]], [0.0, 1]))
    with pytest.raises(InvalidInputError, match=r"shape|no rows"):
        module.predict(bad)


def test_text_where_numbers_belong_is_refused():
    module = translate(LinearRegression().fit([[0.0], [1]], [0.0, 1]))
    with pytest.raises(InvalidInputError, match="text where numbers belong"):
        module.predict([["x"]])


def test_many_rows_run_in_chunks(monkeypatch):
    monkeypatch.setattr("mlsys_windtunnel.module.ROWS_PER_CHUNK", 7)
    x = np.random.default_rng(0).normal(size=(50, 3))
    source = LinearRegression().fit(x, x.sum(1))
    np.testing.assert_allclose(translate(source).predict(x), source.predict(x))


def test_float32_is_an_option():
    x = np.random.default_rng(0).normal(size=(50, 3))
    source = LinearRegression().fit(x, x.sum(1))
    module = translate(source, dtype=torch.float32)
    assert module.dtype is torch.float32
    np.testing.assert_allclose(module.predict(x), source.predict(x), atol=1e-5)


def test_a_module_is_loaded_in_a_fresh_process_and_answers_the_same(answer_alone):
    x = np.random.default_rng(0).normal(size=(20, 2))
    source = make_pipeline(StandardScaler(), LogisticRegression()).fit(x, x[:, 0] > 0)
    np.testing.assert_allclose(answer_alone(translate(source), x), source.predict_proba(x), atol=1e-12)


def test_a_converter_of_ones_own_is_used():
    source = f"{Shout.__module__}.Shout"
    registry = ConverterRegistry({source: Entry(source, lambda _: Affine([[2.0]], [1.0]))})
    module = translate(Shout().fit(None), np.zeros((1, 1)), registry=registry)
    assert module.transform([[3.0]]).tolist() == [[7.0]]


def test_lists_of_text_and_numbers_keep_their_numbers(frame, target):
    rows = [[c, int(a > 0)] for a, c in zip(frame.a, frame.c, strict=True)]
    encoder = OneHotEncoder(handle_unknown="ignore")
    source = make_pipeline(encoder, LogisticRegression()).fit(np.array(rows, object), target)
    np.testing.assert_allclose(translate(source).predict_proba(rows), source.predict_proba(np.array(rows, object)))


@pytest.mark.filterwarnings("error")
def test_read_only_input_is_taken(frame):
    x = frame[["a", "b"]].to_numpy()
    x.flags.writeable = False
    translate(LinearRegression().fit(x, frame.a)).predict(x)


def test_the_entrance_is_the_function_whatever_was_imported_before():
    import mlsys_windtunnel.convert.translation
    from mlsys_windtunnel import WindTunnelModule
    from mlsys_windtunnel import translate as entrance

    assert entrance is mlsys_windtunnel.convert.translation.translate is translate
    assert isinstance(entrance(LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0])), WindTunnelModule)


def test_it_shows_itself_in_notebooks(frame: pd.DataFrame, target: np.ndarray) -> None:
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(frame[["a", "b"]], target)
    shown = translate(pipeline)._repr_html_()
    assert '<th scope="row">answers</th><td>predict, predict_proba, predict_log_proba, decision_function</td>' in shown
    assert "<td>no, yes</td>" in shown


class CatBoostRegressor(RegressorMixin, BaseEstimator):
    """A model that only a plugin can convert."""

    __module__ = "catboost.core"

    def fit(self, X, y):  # noqa: N803
        self.n_features_in_ = X.shape[1]
        return self

    def predict(self, X):  # noqa: N803
        return np.zeros(len(X))


def test_a_model_of_a_plugin_that_is_not_installed_names_the_distribution(monkeypatch: pytest.MonkeyPatch):
    for module in (libraries, boosters, names):
        monkeypatch.setattr(module, "plugin_libraries", dict)
    source = CatBoostRegressor().fit(np.zeros((4, 2)), np.zeros(4))
    for fitted in (source, make_pipeline(StandardScaler().fit(np.zeros((4, 2))), source)):
        with pytest.raises(MissingDependencyError, match="pip install mlsys-windtunnel-catboost"):
            translate(fitted, registry=ConverterRegistry({entry.source: entry for entry in converters()}))
