"""The graph of a fitted pipeline: running it operator by operator gives what the pipeline gives."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from lightgbm import LGBMClassifier
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import Kind, PipelineGraph, parse_pipeline
from numpy.typing import NDArray
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, OneHotEncoder, PolynomialFeatures, StandardScaler

ROWS = 60


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    rng = np.random.default_rng(3)
    numbers = {name: rng.normal(size=ROWS) for name in ("age", "fare", "speed")}
    return pd.DataFrame({**numbers, "port": rng.choice(["x", "y", "z"], ROWS), "deck": rng.choice(["1", "2"], ROWS)})


@pytest.fixture(scope="module")
def target(table: pd.DataFrame) -> NDArray[np.int64]:
    return (table["age"] + table["fare"] > 0).to_numpy(np.int64)


def run_graph(graph: PipelineGraph, rows: Any) -> Any:
    """What the graph means: each operator applied to the tables it reads."""
    tables = {graph.input.name: rows}
    for operator in graph.operators:
        inputs = [tables[value.name] for value in operator.inputs]
        estimator: Any = operator.estimator
        if operator.kind is Kind.SELECT:
            assert operator.columns is not None
            columns = list(operator.columns)
            result = inputs[0].iloc[:, columns] if hasattr(inputs[0], "iloc") else inputs[0][:, columns]
        elif operator.kind is Kind.CONCATENATE:
            result = np.hstack([getattr(part, "toarray", lambda part=part: np.asarray(part))() for part in inputs])
        elif operator.kind is Kind.SCALE:
            result = inputs[0] * operator.weight
        elif operator.kind is Kind.TRANSFORM:
            result = estimator.transform(inputs[0])
        else:
            result = (estimator.predict_proba if hasattr(estimator, "predict_proba") else estimator.predict)(inputs[0])
        if operator.output.width is not None:
            assert (result.shape[1] if result.ndim == 2 else 1) == operator.output.width
        tables[operator.output.name] = result
    return tables[graph.output.name]


def test_the_graph_of_a_real_pipeline(table: pd.DataFrame, target: NDArray[np.int64]):
    columns = ColumnTransformer(
        [
            ("numbers", make_pipeline(StandardScaler(), PCA(2)), ["age", "fare", "speed"]),
            ("words", OneHotEncoder(), ["port"]),
            ("none", StandardScaler(), []),
        ],
        remainder="drop",
        transformer_weights={"numbers": 0.5},
    )
    model = LGBMClassifier(n_estimators=4, num_leaves=4, min_child_samples=2, verbose=-1)
    fitted = Pipeline([("columns", columns), ("skip", "passthrough"), ("model", model)]).fit(table, target)
    graph = parse_pipeline(fitted)
    assert [(operator.name, operator.kind.value, operator.output.width) for operator in graph.operators] == [
        ("columns/numbers/select", "select", 3),
        ("columns/numbers/standardscaler", "transform", 3),
        ("columns/numbers/pca", "transform", 2),
        ("columns/numbers/weight", "scale", 2),
        ("columns/words/select", "select", 1),
        ("columns/words", "transform", 3),
        ("columns/concatenate", "concatenate", 5),
        ("model", "predict", 2),
    ]
    assert graph.columns == ("age", "fare", "speed", "port", "deck")
    assert graph.operators[1].source == "sklearn.preprocessing.StandardScaler"
    assert graph.operators[-1].source == "lightgbm.sklearn.LGBMClassifier"
    np.testing.assert_allclose(run_graph(graph, table), fitted.predict_proba(table))


def named(parts: list[Any]) -> list[tuple[str, Any]]:
    return [(f"part{number}", part) for number, part in enumerate(parts)]


LEAVES = [
    "passthrough",
    "drop",
    PCA(1),
    StandardScaler(),
    MinMaxScaler(),
    PolynomialFeatures(2),
    FunctionTransformer(np.abs),
]
COLUMNS = [[0], [-1], [0, -1], slice(None), []]  # these exist in any table


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Random pipelines, unions and column transformers of ``inner``."""
    parts = st.lists(inner, min_size=1, max_size=3).map(named)
    weights = st.sampled_from([None, {"part0": 0.5}])
    steps = inner.filter(lambda part: not isinstance(part, str))
    chains = st.lists(steps, min_size=1, max_size=3).map(named).map(Pipeline)
    unions = st.builds(FeatureUnion, parts, transformer_weights=weights)
    columns = st.builds(
        lambda parts, places, **options: ColumnTransformer(
            [(name, part, place) for (name, part), place in zip(parts, places, strict=False)], **options
        ),
        parts,
        st.lists(st.sampled_from(COLUMNS), min_size=3, max_size=3),
        remainder=st.sampled_from(["drop", "passthrough"]),
        transformer_weights=weights,
    )
    return st.one_of(chains, unions, columns)


TRANSFORMERS = nest(st.recursive(st.sampled_from(LEAVES).map(deepcopy), nest, max_leaves=4))


@settings(max_examples=120, deadline=None)
@given(TRANSFORMERS, st.booleans())
def test_running_the_graph_is_running_the_pipeline(features: Any, has_model: bool):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(30, 4))
    fitted = Pipeline([("features", features), ("last", LinearRegression() if has_model else StandardScaler())])
    try:
        fitted.fit(rows, rng.normal(size=30))
    except ValueError:  # nothing left: every part dropped, or without columns
        reject()
    expected = fitted.predict(rows) if has_model else fitted.transform(rows)
    graph = parse_pipeline(fitted)
    np.testing.assert_allclose(run_graph(graph, rows), expected, rtol=1e-9, atol=1e-9)
    names = [operator.output.name for operator in graph.operators]
    assert len(set(names)) == len(names)


def test_steps_named_like_our_own_operators_keep_their_place(table: pd.DataFrame):
    steps = Pipeline([("select", StandardScaler()), ("weight", PCA(1))])
    columns = ColumnTransformer([("a", steps, ["age", "fare"]), ("concatenate", MinMaxScaler(), ["speed"])])
    fitted = columns.set_params(transformer_weights={"a": 3.0}).fit(table)
    graph = parse_pipeline(fitted)
    names = [operator.output.name for operator in graph.operators]
    assert names[:4] == ["a/select", "a/select-2", "a/weight", "a/weight-2"]
    assert len(set(names)) == len(names)
    np.testing.assert_allclose(run_graph(graph, table), fitted.transform(table))


def test_a_parameter_search_is_its_best_pipeline(table: pd.DataFrame, target: NDArray[np.int64]):
    pipe = Pipeline([("scale", StandardScaler()), ("model", LogisticRegression())])
    search = GridSearchCV(pipe, {"model__C": [0.1, 1.0]}, cv=2).fit(table[["age", "fare"]], target)
    graph = parse_pipeline(search)
    assert [operator.name for operator in graph.operators] == ["scale", "model"]
    np.testing.assert_allclose(run_graph(graph, table[["age", "fare"]]), search.predict_proba(table[["age", "fare"]]))


def test_a_single_estimator_is_one_operator(table: pd.DataFrame, target: NDArray[np.int64]):
    targets = np.column_stack([target, target, target]).astype(float)
    graph = parse_pipeline(LinearRegression().fit(table[["age", "fare"]].to_numpy(), targets))
    (operator,) = graph.operators
    assert (operator.name, operator.kind, operator.output.width) == ("linearregression", Kind.PREDICT, 3)
    assert (graph.input.width, graph.columns, graph.size.num_parameters) == (2, None, 9)


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        ({"model": 1}, "got dict"),
        (StandardScaler, "got type"),
        (StandardScaler(), "StandardScaler is not fitted"),
        (make_pipeline(StandardScaler(), LinearRegression()), "Pipeline is not fitted"),
    ],
)
def test_what_is_no_fitted_estimator_is_refused(thing: object, says: str):
    with pytest.raises(InvalidInputError, match=says):
        parse_pipeline(thing)


def test_a_part_that_is_not_fitted_is_named():
    half = make_pipeline(StandardScaler(), LinearRegression()).fit([[0.0], [1.0]], [0.0, 1.0])
    half.steps[0] = ("scale", StandardScaler())
    with pytest.raises(InvalidInputError, match="scale is not fitted"):
        parse_pipeline(half)
