"""Trees in skops files need no trust where each index stays within its table, and are refused where one does not."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import skops.io
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import load_estimator
from sklearn.ensemble import (
    BaggingClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    IsolationForest,
    RandomForestClassifier,
    StackingClassifier,
)
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.tree import DecisionTreeClassifier

X = np.random.default_rng(0).normal(size=(80, 4))
Y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)
FRAME = pd.DataFrame(X[:, :2], columns=["a", "b"]).assign(c=pd.Categorical(np.where(X[:, 2] > 0, "x", "y")))
MODELS = {
    "tree": DecisionTreeClassifier(max_depth=3),
    "forest": make_pipeline(SimpleImputer(), RandomForestClassifier(3)),
    "extra trees": ExtraTreesRegressor(3),
    "boosting": GradientBoostingClassifier(n_estimators=2),
    "bagging": BaggingClassifier(DecisionTreeClassifier(max_depth=2), 3, max_features=0.5),
    "isolation": IsolationForest(n_estimators=5),
    "isolation of some columns": IsolationForest(n_estimators=5, max_features=0.5),
    "stack": StackingClassifier([("a", DecisionTreeClassifier()), ("b", LogisticRegression())], cv=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_trees_need_no_trust(tmp_path: Path, name: str):
    model = MODELS[name].fit(X, Y)
    skops.io.dump(model, tmp_path / "model.skops")
    np.testing.assert_array_equal(load_estimator(tmp_path / "model.skops").predict(X), model.predict(X))


def test_histogram_boosting_with_categories_needs_no_trust(tmp_path: Path):
    model = HistGradientBoostingClassifier(max_iter=3, min_samples_leaf=2, categorical_features="from_dtype")
    skops.io.dump(model.fit(FRAME, Y), tmp_path / "model.skops")
    loaded = load_estimator(tmp_path / "model.skops")
    np.testing.assert_array_equal(loaded.predict_proba(FRAME), model.predict_proba(FRAME))


def _forged(path: Path, change: Callable[[np.ndarray], None], *, field: str) -> Path:
    """A copy of a skops file in which the arrays of nodes that have ``field`` are changed."""
    forged, num_changed = path.with_name("forged.skops"), 0
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(forged, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith(".npy") and field in (np.load(io.BytesIO(data)).dtype.names or ()):
                nodes = np.load(io.BytesIO(data))
                change(nodes)
                buffer = io.BytesIO()
                np.save(buffer, nodes)
                data, num_changed = buffer.getvalue(), num_changed + 1
            target.writestr(name, data)
    assert num_changed, "nothing was forged"
    return forged


def _set(field: str, value: int) -> Callable[[np.ndarray], None]:
    def change(nodes: np.ndarray) -> None:
        nodes[field][0] = value

    return change


@pytest.mark.parametrize("field", ["left_child", "right_child", "feature"])
@pytest.mark.parametrize("value", [10**6, -7, 0])
@pytest.mark.parametrize("model", [DecisionTreeClassifier(max_depth=3), RandomForestClassifier(2)], ids=["one", "many"])
def test_a_forged_index_is_refused(tmp_path: Path, model: Any, field: str, value: int):
    skops.io.dump(model.fit(X, Y), tmp_path / "model.skops")
    forged = _forged(tmp_path / "model.skops", _set(field, value), field="left_child")
    if (field, value) == ("feature", 0):
        load_estimator(forged)  # a wrong tree, but one within its tables
        return
    with pytest.raises(InvalidInputError, match="points outside its tables"):
        load_estimator(forged)


@pytest.mark.parametrize(("field", "value"), [("left", 10**6), ("right", 0), ("feature_idx", 4)])
def test_a_forged_index_of_histogram_boosting_is_refused(tmp_path: Path, field: str, value: int):
    skops.io.dump(HistGradientBoostingClassifier(max_iter=2).fit(X, Y), tmp_path / "model.skops")
    forged = _forged(tmp_path / "model.skops", _set(field, value), field="feature_idx")
    with pytest.raises(InvalidInputError, match="points outside its tables"):
        load_estimator(forged)


@pytest.mark.parametrize("model", [RandomForestClassifier(2), GradientBoostingClassifier(n_estimators=2)])
def test_an_estimator_that_claims_fewer_columns_than_its_trees_is_refused(tmp_path: Path, model: Any):
    model.fit(X, Y).n_features_in_ = 1
    skops.io.dump(model, tmp_path / "model.skops")
    with pytest.raises(InvalidInputError, match="points outside its tables"):
        load_estimator(tmp_path / "model.skops")


@pytest.mark.parametrize("model", [RandomForestClassifier(2), IsolationForest(n_estimators=2)])
def test_a_member_that_claims_fewer_columns_than_its_tree_is_refused(tmp_path: Path, model: Any):
    model.fit(X, Y).estimators_[0].n_features_in_ = 1
    skops.io.dump(model, tmp_path / "model.skops")
    with pytest.raises(InvalidInputError, match="points outside its tables"):
        load_estimator(tmp_path / "model.skops")


def test_a_tree_without_nodes_is_refused(tmp_path: Path):
    skops.io.dump(DecisionTreeClassifier().fit(X, Y), tmp_path / "model.skops")
    with zipfile.ZipFile(tmp_path / "model.skops") as file:
        schema = json.loads(file.read("schema.json"))
        arrays = {name: file.read(name) for name in file.namelist() if name != "schema.json"}
    for name, data in arrays.items():
        array = np.load(io.BytesIO(data))
        if array.dtype.names or array.ndim == 3:
            buffer = io.BytesIO()
            np.save(buffer, array[:0])
            arrays[name] = buffer.getvalue()
    with zipfile.ZipFile(tmp_path / "empty.skops", "w") as file:
        file.writestr("schema.json", json.dumps(schema))
        for name, data in arrays.items():
            file.writestr(name, data)
    with pytest.raises(InvalidInputError):
        load_estimator(tmp_path / "empty.skops")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("table", ["nodes", "values"])
def test_a_table_without_dimensions_does_not_end_the_process(tmp_path: Path, table: str):
    """In a process of its own: without the check, one without nodes ends the interpreter."""
    x = np.arange(12.0).reshape(6, 2)
    skops.io.dump(DecisionTreeClassifier(max_depth=2).fit(x, x[:, 0] > 4), tmp_path / "good.skops")
    with zipfile.ZipFile(tmp_path / "good.skops") as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    for name, content in members.items():
        array = np.load(io.BytesIO(content)) if name.endswith(".npy") else np.empty(0)
        if (array.dtype.names and table == "nodes") or (array.ndim == 3 and table == "values"):
            buffer = io.BytesIO()
            np.save(buffer, np.int64(2))
            members[name] = buffer.getvalue()
    with zipfile.ZipFile(tmp_path / "bad.skops", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    code = (
        "import sys; from pathlib import Path; from mlsys_windtunnel.parse.load import load_estimator\n"
        "from mlsys_core.errors import InvalidInputError\n"
        "try: load_estimator(Path(sys.argv[1]))\n"
        "except InvalidInputError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bad.skops")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert "a tree in it is damaged" in done.stdout
