"""Folders that somebody forged: one line, no crash of native code, whatever was changed."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import GRAPH_FILE, TENSORS_FILE, load, save
from mlsys_windtunnel.finetune.tune import fine_tune
from safetensors.torch import load_file, save_file
from sklearn.compose import make_column_transformer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

RNG = np.random.default_rng(0)
FRAME = pd.DataFrame({"a": RNG.normal(size=60), "b": RNG.choice(["x", "y"], 60), "c": RNG.choice([1.0, 2.0], 60)})
X = FRAME[["a", "c"]].to_numpy()
Y = (FRAME.a > 0).to_numpy().astype(int)
JUNK = (None, True, -1, 0, 3, 10**9, 2**70, 1.5, 1e308, "", "x", "\x00", [], {}, [1], {"$": "tuple", "items": []})


@pytest.fixture(scope="module")
def categories(tmp_path_factory) -> Path:
    columns = make_column_transformer((StandardScaler(), ["a"]), (OneHotEncoder(handle_unknown="ignore"), ["b", "c"]))
    source = make_pipeline(columns, LogisticRegression()).fit(FRAME, Y)
    return save(translate(source), tmp_path_factory.mktemp("categories"))


@pytest.fixture(scope="module")
def forest(tmp_path_factory) -> Path:
    source = RandomForestClassifier(3, max_depth=4, random_state=0).fit(X, Y)
    return save(translate(source), tmp_path_factory.mktemp("forest"))


@pytest.fixture(scope="module")
def soft(tmp_path_factory) -> Path:
    source = RandomForestClassifier(2, max_depth=3, random_state=0).fit(X, Y)
    tuned = fine_tune(translate(source), X, Y, level="L2", epochs=1, init="source")
    return save(tuned.module, tmp_path_factory.mktemp("soft"))


def _changed(folder: Path, target: Path, change: Any) -> Path:
    """A copy whose tensors were changed, with the right hash."""
    tensors = load_file(folder / TENSORS_FILE)
    change(tensors)
    target.mkdir(exist_ok=True)
    save_file(tensors, target / TENSORS_FILE)
    graph = json.loads((folder / GRAPH_FILE).read_text())
    graph["sha256"] = hashlib.sha256((target / TENSORS_FILE).read_bytes()).hexdigest()
    (target / GRAPH_FILE).write_text(json.dumps(graph))
    return target


def _named(tensors: dict[str, torch.Tensor], end: str) -> str:
    return next(name for name in tensors if name.endswith(end))


@pytest.mark.parametrize(
    ("end", "value"),
    [
        *((f"body.{name}", 10**6) for name in ("left", "root", "leaf_start", "feature", "category_set")),
        ("body.right", -(10**6)),
        ("body.left", 0),
        ("body.feature", -1),
    ],
)
def test_trees_that_point_elsewhere_are_refused(forest, tmp_path, end, value):
    def change(tensors):
        tensors[_named(tensors, end)][-1] = value

    assert load(forest).predict(X).shape == (60,)
    with pytest.raises(InvalidInputError, match="its trees point outside their tables"):
        load(_changed(forest, tmp_path / "forged", change))


@pytest.mark.parametrize(("end", "value"), [(".left", 999), (".right", -999), (".num_splits", 999), (".feature", 999)])
def test_soft_trees_that_point_elsewhere_are_refused(soft, tmp_path, end, value):
    def change(tensors):
        tensors[_named(tensors, end)].view(-1)[0] = value

    names = load_file(soft / TENSORS_FILE)
    assert any(name.endswith(end) for name in names), sorted(names)
    with pytest.raises(InvalidInputError, match="trees point outside their tables"):
        load(_changed(soft, tmp_path / "forged", change))


def _forged_graph(folder: Path, target: Path, change: Any) -> Path:
    graph = json.loads((folder / GRAPH_FILE).read_text())
    change(graph)
    target.mkdir(exist_ok=True)
    (target / GRAPH_FILE).write_text(json.dumps(graph))
    (target / TENSORS_FILE).write_bytes((folder / TENSORS_FILE).read_bytes())
    return target


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, item in items for below in _paths(item, (*path, key)))]


def _set(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def test_codes_beyond_the_tables_are_refused(categories, tmp_path):
    def change(graph):
        text = json.dumps(graph)
        assert '"codes": {"x": 0, "y": 1}' in text
        graph.update(json.loads(text.replace('"codes": {"x": 0, "y": 1}', '"codes": {"x": 0, "y": 100000}')))

    with pytest.raises(InvalidInputError, match="categories point outside"):
        load(_forged_graph(categories, tmp_path / "forged", change))


@pytest.mark.parametrize("kind", ["categories", "forest"])
def test_any_junk_in_the_graph_is_refused_in_one_line_or_harmless(request, tmp_path, kind):
    folder: Path = request.getfixturevalue(kind)
    graph = json.loads((folder / GRAPH_FILE).read_text())
    paths = [path for path in _paths(graph) if path and path != ("sha256",)]
    random_ = random.Random(0)
    refused = 0
    for _ in range(250):
        path, junk = random_.choice(paths), random_.choice(JUNK)
        forged = _forged_graph(folder, tmp_path / "forged", lambda graph, path=path, junk=junk: _set(graph, path, junk))
        refusal = _refusal(forged, FRAME if kind == "categories" else X)
        assert refusal is None or (isinstance(refusal, InvalidInputError) and "\n" not in str(refusal)), (path, junk)
        refused += refusal is not None
    assert refused > 100


def _refusal(folder: Path, x: Any) -> Exception | None:
    try:
        load(folder).predict(x)
    except Exception as error:  # noqa: BLE001  what it is, the test looks at
        return error
    return None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"null", b"[]", b'{"format": 1}', b"\xff\xfe", b"1" * 5000]
)
def test_an_invalid_graph_is_refused_in_one_line(forest, tmp_path, content):
    (tmp_path / GRAPH_FILE).write_bytes(content)
    (tmp_path / TENSORS_FILE).write_bytes((forest / TENSORS_FILE).read_bytes())
    with pytest.raises(InvalidInputError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("kind", ["trees", "linear"])
def test_classes_that_are_left_out_are_refused(tmp_path, kind, keep):
    labels = np.digitize(FRAME.a, [-0.5, 0.5])
    source = (RandomForestClassifier(2, max_depth=3) if kind == "trees" else LogisticRegression()).fit(X, labels)
    save(translate(source), tmp_path)
    graph = json.loads((tmp_path / GRAPH_FILE).read_text())
    found = _cut_classes(graph, keep)
    assert found
    (tmp_path / GRAPH_FILE).write_text(json.dumps(graph))
    with pytest.raises(InvalidInputError, match="classes"):
        load(tmp_path)


def _cut_classes(value: Any, keep: int) -> bool:
    """Keep the first names of each list ``[0, 1, 2]`` that is called ``classes``."""
    found = False
    for name, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        items = each.get("items") if isinstance(each, dict) else each
        if name == "classes" and items == [0, 1, 2]:
            del items[keep:]
            found = True
        found |= _cut_classes(each, keep)
    return found
