"""The graph of a fitted pipeline: running it operator by operator gives what the pipeline gives."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from lightgbm import LGBMClassifier
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import Kind, PipelineGraph, parse_pipeline
from numpy.typing import NDArray
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingClassifier, StackingClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.multioutput import RegressorChain
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, OneHotEncoder, PolynomialFeatures, StandardScaler
from sklearn.svm import LinearSVC

from tests.graph_checks import check_graph

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
    """Run the graph: apply each operator to the tables it reads."""
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
        lambda parts, indices, **options: ColumnTransformer(
            [(name, part, index) for (name, part), index in zip(parts, indices, strict=False)], **options
        ),
        parts,
        st.lists(st.sampled_from(COLUMNS), min_size=3, max_size=3),
        remainder=st.sampled_from(["drop", "passthrough"]),
        transformer_weights=weights,
    )
    return st.one_of(chains, unions, columns)


TRANSFORMERS = nest(st.recursive(st.sampled_from(LEAVES).map(deepcopy), nest, max_leaves=4))


@settings(max_examples=120)
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


def test_the_graph_as_networkx_has_its_tables_as_edges(table: pd.DataFrame, target: NDArray[np.int64], tmp_path: Path):
    columns = ColumnTransformer([("scale", StandardScaler(), ["fare", "age"]), ("port", OneHotEncoder(), ["port"])])
    source = make_pipeline(columns, LGBMClassifier(n_estimators=2, min_child_samples=2, verbose=-1)).fit(table, target)
    parsed = parse_pipeline(source)
    graph = parsed.to_networkx()
    check_graph(graph, tmp_path)
    assert list(graph) == ["input", *(operator.name for operator in parsed.operators)]
    assert set(graph.edges) == {
        (value.name, operator.name) for operator in parsed.operators for value in operator.inputs
    }
    picked = {data["picked"]: data["columns"] for _, _, data in graph.edges("input", data=True)}
    assert picked == {"fare, age": 5, "port": 5}
    last = graph.nodes[parsed.output.name]
    assert (last["kind"], last["estimator"]) == ("predict", "lightgbm.sklearn.LGBMClassifier")
    assert nx.dag_longest_path_length(graph, weight=None) == 4


def test_the_check_of_a_meta_estimator_is_a_guard(table: pd.DataFrame, target: NDArray[np.int64], tmp_path: Path):
    members = [("a", LogisticRegression()), ("b", RidgeClassifier())]
    stack = StackingClassifier(members, cv=2).fit(table[["age", "fare"]], target)
    parsed = parse_pipeline(stack)
    graph = parsed.to_networkx()
    check_graph(graph, tmp_path)
    guards = {edge for edge, is_one in nx.get_edge_attributes(graph, "is_guard").items() if is_one}
    assert guards == {
        (value.name, operator.name)
        for operator in parsed.operators
        for value in operator.guards
        if value not in operator.inputs
    }


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


def test_a_stack_is_its_members_their_join_and_the_final_estimator(table: pd.DataFrame, target: NDArray[np.int64]):
    bagging = BaggingClassifier(LogisticRegression(), n_estimators=2, max_features=2, random_state=0)
    search = GridSearchCV(bagging, {"estimator__C": [1.0]}, cv=2)
    stack = StackingClassifier([("bag", search), ("margin", LinearSVC())], RidgeClassifier(), passthrough=True, cv=2)
    fitted = Pipeline([("scale", StandardScaler()), ("stack", stack)]).fit(table[["age", "fare", "speed"]], target)
    graph = parse_pipeline(fitted)
    described = [
        (operator.name, operator.kind.value, [value.name for value in operator.inputs], operator.output.width)
        for operator in graph.operators
    ]
    assert described == [
        ("scale", "transform", ["input"], 3),
        ("stack/bag/0/select", "select", ["scale"], 2),
        ("stack/bag/0", "predict", ["stack/bag/0/select"], 3),
        ("stack/bag/1/select", "select", ["scale"], 2),
        ("stack/bag/1", "predict", ["stack/bag/1/select"], 3),
        ("stack/bag", "combine", ["stack/bag/0", "stack/bag/1"], 2),
        ("stack/bag/select", "select", ["stack/bag"], 1),
        ("stack/margin", "predict", ["scale"], 1),
        ("stack/concatenate", "concatenate", ["stack/bag/select", "stack/margin", "scale"], 5),
        ("stack/final_estimator", "predict", ["stack/concatenate"], 2),
        ("stack", "combine", ["stack/final_estimator"], 1),
    ]
    methods = {operator.name: operator.methods for operator in graph.operators if operator.methods}
    assert methods == {
        "stack/bag/0": ("predict_proba", "decision_function"),
        "stack/bag/1": ("predict_proba", "decision_function"),
        "stack/bag": ("predict_proba",),
        "stack/margin": ("decision_function",),
        "stack/final_estimator": ("predict", "decision_function"),
    }


def test_each_link_of_a_chain_reads_the_answers_before_it(table: pd.DataFrame, target: NDArray[np.int64]):
    targets = np.column_stack([target, 1 - target, target])
    fitted = RegressorChain(LinearRegression(), order=[2, 0, 1]).fit(table[["age", "fare"]], targets)
    graph = parse_pipeline(fitted)
    reads = {operator.name: [value.name for value in operator.inputs] for operator in graph.operators}
    assert reads["2/concatenate"] == ["select", "0", "1"]
    assert reads["regressorchain"] == ["1", "2", "0"], "in the order of targets"
    assert graph.operators[0].drops_names, "the links were fitted on an array"


def test_a_step_called_input_is_not_the_input(table: pd.DataFrame, target: NDArray[np.int64]):
    fitted = Pipeline([("input", StandardScaler()), ("model", LogisticRegression())])
    graph = parse_pipeline(fitted.fit(table[["age", "fare"]], target))
    assert [value.name for value in graph.operators[0].inputs] == ["input"]
    assert graph.operators[0].output.name == "input-2"


@pytest.mark.parametrize(
    "columns",
    [
        [("a", StandardScaler(), slice("age", "fare"))],
        [("a", StandardScaler(), [True, False, True, False, False])],
        [("a", StandardScaler(), lambda frame: [name for name in frame if frame[name].dtype == float][:2])],
        [("a", MinMaxScaler(), make_column_selector("^[af]", dtype_include=float)), ("b", OneHotEncoder(), ["port"])],
        [("a", StandardScaler(), [-5]), ("b", "passthrough", np.array([2])), ("c", "drop", ["fare"])],
    ],
    ids=["slice", "mask", "callable", "selector", "index"],
)
@pytest.mark.parametrize("remainder", ["drop", OneHotEncoder(sparse_output=False)], ids=["drop", "one-hot"])
def test_columns_however_they_are_chosen(table: pd.DataFrame, columns: Any, remainder: Any):
    fitted = ColumnTransformer(columns, remainder=remainder, sparse_threshold=0).fit(table)
    np.testing.assert_allclose(run_graph(parse_pipeline(fitted), table), fitted.transform(table))


def test_a_union_with_parts_dropped_and_passed_through(table: pd.DataFrame):
    numbers = table[["age", "fare"]].to_numpy()
    fitted = FeatureUnion([("gone", PCA(1)), ("same", "passthrough"), ("scaled", StandardScaler())])
    fitted.set_params(gone="drop").fit(numbers)
    np.testing.assert_allclose(run_graph(parse_pipeline(fitted), numbers), fitted.transform(numbers))


def test_a_pipeline_with_a_memory_is_what_was_fitted(tmp_path: Path, table: pd.DataFrame, target: NDArray[np.int64]):
    steps = [("scale", StandardScaler()), ("pca", PCA(1)), ("model", LogisticRegression())]
    fitted = Pipeline(steps, memory=str(tmp_path)).fit(table[["age", "fare"]], target)
    assert not hasattr(steps[0][1], "mean_"), "a cached step is a clone"
    graph = parse_pipeline(fitted)
    np.testing.assert_allclose(run_graph(graph, table[["age", "fare"]]), fitted.predict_proba(table[["age", "fare"]]))


def test_a_single_estimator_is_one_operator(table: pd.DataFrame, target: NDArray[np.int64]):
    targets = np.column_stack([target, target, target]).astype(float)
    graph = parse_pipeline(LinearRegression().fit(table[["age", "fare"]].to_numpy(), targets))
    (operator,) = graph.operators
    assert (operator.name, operator.kind, operator.output.width) == ("linearregression", Kind.PREDICT, 3)
    assert (graph.input.width, graph.columns) == (2, None)


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        ({"model": 1}, "got dict"),
        (StandardScaler, "got type"),
        (StandardScaler(), "StandardScaler is not fitted"),
        (make_pipeline(StandardScaler(), LinearRegression()), "Pipeline is not fitted"),
    ],
)
def test_only_a_fitted_estimator_is_accepted(thing: object, says: str):
    with pytest.raises(InvalidInputError, match=says):
        parse_pipeline(thing)


def test_a_part_that_is_not_fitted_is_named():
    half = make_pipeline(StandardScaler(), LinearRegression()).fit([[0.0], [1.0]], [0.0, 1.0])
    half.steps[0] = ("scale", StandardScaler())
    with pytest.raises(InvalidInputError, match="scale is not fitted"):
        parse_pipeline(half)
