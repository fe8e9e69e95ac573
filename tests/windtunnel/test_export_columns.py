"""ONNX files that take raw columns by name answer as the source does, in a process without WindTunnel."""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightgbm import LGBMClassifier
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.estimators import HashEncoder
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.onnx import export_onnx, load_onnx
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from sklearn.compose import ColumnTransformer, make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestRegressor
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler, TargetEncoder

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="needs pip install 'mlsys-windtunnel[onnx]' onnxruntime")
NUMPY = {"tensor(string)": object, "tensor(double)": np.float64, "tensor(int64)": np.int64, "tensor(bool)": bool}

BARE = """
import pickle, sys
import onnxruntime
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("mlsys"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Without())
sys.path.insert(0, ".")
cases = pickle.load(open("cases.pickle", "rb"))
found = {}
for name, feeds in cases.items():
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(name, options)
    answers = []
    for feed in feeds:
        try:
            answers.append(session.run(None, feed))
        except Exception as error:
            answers.append(" ".join(str(error).split()))
    found[name] = answers
assert not {"sklearn", "mlsys_core", "mlsys_windtunnel"} & set(sys.modules)
pickle.dump(found, open("found.pickle", "wb"))
"""


def frame(seed: int, words: list[Any]) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    made = pd.DataFrame(
        {
            "age": rng.normal(size=60),
            "rooms": rng.integers(0, 5, 60),
            "city": pd.Series(rng.choice(np.array(words, object), 60), dtype=object),
            "is new": rng.random(60) < 0.5,
            "text": rng.choice(["Good Day, Ärger", "bad day", "a day à la good day"], 60),
        }
    )
    made.loc[::7, "age"] = np.nan
    return made


TRAIN = frame(0, ["Oslo", "Rom", "Zürich", "", np.nan])
LABELS = np.where(TRAIN.rooms + (TRAIN.city == "Rom") > 2, "hoch", "låg")
FRESH = frame(1, ["Oslo", "Rom", "", np.nan, "日本", "new"])
TEXTS = FRESH.assign(text=["", "GOOD day Ärger", "\u0130 ß ﬁn day"] * 20)


def filled() -> Any:
    return make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore"))


def columns(*more: Any) -> ColumnTransformer:
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    return make_column_transformer((numbers, ["age", "rooms"]), (filled(), ["city"]), *more)


TRUTH = (OneHotEncoder(drop="if_binary"), ["is new"])
SOURCES: dict[str, Any] = {
    "logistic": make_pipeline(columns(TRUTH), LogisticRegression()),
    "boosted": make_pipeline(columns(TRUTH), LGBMClassifier(n_estimators=5, min_child_samples=3, verbose=-1)),
    "target": make_pipeline(
        make_column_transformer((TargetEncoder(random_state=0), ["city", "rooms"])), LogisticRegression()
    ),
    "ordinal": make_pipeline(
        make_column_transformer(
            (OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-2), ["city"]),
            (make_union(MissingIndicator(features="all"), SimpleImputer()), ["age"]),
        ),
        HistGradientBoostingClassifier(max_iter=5),
    ),
    "refusing": make_pipeline(make_column_transformer((OneHotEncoder(), ["city"])), LogisticRegression()),
    "forest": make_pipeline(columns(), RandomForestRegressor(5, random_state=0)),
    "scaler": columns(),
}
TEXT_SOURCES: dict[str, Any] = {
    "tfidf": make_pipeline(
        columns((TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), "text")), LogisticRegression()
    ),
    "characters": make_pipeline(
        columns(
            (
                TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True, strip_accents="unicode"),
                "text",
            )
        ),
        LogisticRegression(),
    ),
    "counts": make_pipeline(
        make_column_transformer((CountVectorizer(stop_words=["bad"], binary=True), "text")), Ridge()
    ),
    "outputs": make_pipeline(columns(), MultiOutputClassifier(LogisticRegression())),
    "hashed": make_pipeline(make_column_transformer((HashEncoder(n_components=4), ["city"])), LogisticRegression()),
}


def fitted(name: str, source: Any) -> Any:
    target: Any = TRAIN.rooms.to_numpy(float) if name in ("forest", "counts") else LABELS
    if name == "outputs":
        target = np.stack([LABELS, np.where(TRAIN["is new"], "yes", "no")], axis=1)
    return source.fit(TRAIN, target)


def expected(source: Any, rows: pd.DataFrame) -> list[Any] | str:
    names = [name for name in ("predict", "predict_proba", "transform") if hasattr(source, name)]
    try:
        return [getattr(source, name)(rows) for name in names]
    except ValueError as error:
        return str(error)


def run_bare(folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    subprocess.run([sys.executable, "-c", BARE], cwd=folder, check=True, timeout=300)
    found: dict[str, Any] = pickle.loads((folder / "found.pickle").read_bytes())
    return found


def same(got: Any, wanted: Any) -> None:
    if isinstance(wanted, str):  # a refusal
        assert isinstance(got, str), got
        return
    assert not isinstance(got, str), got
    for one, other in zip(got, wanted, strict=True):
        if isinstance(other, list):
            same(one, other)
        elif np.asarray(other).dtype.kind == "f" or hasattr(other, "toarray"):
            other = other.toarray() if hasattr(other, "toarray") else other
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
        else:
            assert (one == other).all()


def inputs_of(path: Path, rows: pd.DataFrame) -> dict[str, Any]:
    import onnxruntime

    inputs = onnxruntime.InferenceSession(path).get_inputs()
    return {each.name: rows[[each.name]].to_numpy().astype(NUMPY[each.type]) for each in inputs}


@needs_onnx
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("names", [["refusing"], [*SOURCES]], ids=len)
def test_onnx_files_answer_named_columns_in_a_bare_process(names: list[str], tmp_path: Path):
    tables = [TRAIN, FRESH, FRESH[:1], FRESH.assign(age=np.where(np.arange(60) == 3, np.inf, 1.0))]
    sources = {name: fitted(name, SOURCES[name]) for name in names}
    cases = {}
    for name, source in sources.items():
        path = export_onnx(translate(source), tmp_path / f"{name}.onnx", columns=True, X_example=TRAIN)
        cases[path.name] = [inputs_of(path, rows) for rows in tables]
    found = run_bare(tmp_path, cases)
    for name, source in sources.items():
        for got, rows in zip(found[f"{name}.onnx"], tables, strict=True):
            same(got, expected(source, rows))
        if name == "refusing":
            assert "column city has categories that the encoder was not fitted on" in found[f"{name}.onnx"][1]


@pytest.fixture(scope="module")
def logistic_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with named columns."""
    module = translate(fitted("logistic", SOURCES["logistic"]))
    return export_onnx(module, tmp_path_factory.mktemp("logistic") / "m.onnx", columns=True)


@needs_onnx
def test_inputs_have_types_of_their_own_and_answers_have_the_sources_names(logistic_file: Path, tmp_path: Path):
    import onnxruntime

    session = onnxruntime.InferenceSession(logistic_file)
    kinds = {each.name: each.type for each in session.get_inputs()}
    assert kinds == {
        "age": "tensor(double)",
        "rooms": "tensor(double)",
        "city": "tensor(string)",
        "is new": "tensor(bool)",
    }
    assert [each.name for each in session.get_outputs()] == ["label", "probabilities"]
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == ["hoch", "låg"]
    rooms = TRAIN[["rooms"]]
    module = translate(make_pipeline(StandardScaler(), LogisticRegression()).fit(rooms, LABELS))
    typed = export_onnx(module, tmp_path / "n.onnx", columns=True, X_example=rooms)
    assert [each.type for each in onnxruntime.InferenceSession(typed).get_inputs()] == ["tensor(int64)"]


@needs_onnx
def test_an_example_of_integers_takes_all_numbers_that_the_source_takes(tmp_path: Path):
    rows = TRAIN[["age", "rooms"]].assign(age=lambda x: x.age.fillna(0))
    filled = make_pipeline(SimpleImputer(), LogisticRegression()).fit(rows, LABELS)
    plain = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, LABELS)
    for name, source in {"filled": filled, "plain": plain}.items():
        path = export_onnx(translate(source), tmp_path / f"{name}.onnx", columns=True, X_example=rows)
        file, asked = load_onnx(path), rows[:5].assign(rooms=3.0)
        np.testing.assert_allclose(file.predict_proba(asked), source.predict_proba(asked))
        asked["rooms"] = [1, np.nan, 2, 3, 4]
        if name == "filled":
            np.testing.assert_allclose(file.predict_proba(asked), source.predict_proba(asked))
        else:
            with pytest.raises(InvalidInputError, match="holds nan"):
                file.predict_proba(asked)


@needs_onnx
def test_load_onnx_reads_such_a_file(logistic_file: Path):
    source = fitted("logistic", SOURCES["logistic"])
    file = load_onnx(logistic_file)
    same([file.predict(FRESH), file.predict_proba(FRESH)], expected(source, FRESH))
    assert file.answers == ("predict", "predict_proba")
    assert file.classes_.tolist() == source.classes_.tolist()
    with pytest.raises(InvalidInputError, match="Input X contains NaN or infinity, which LogisticRegression refuses"):
        file.predict(FRESH.assign(age=np.inf))
    with pytest.raises(InvalidInputError, match="column city of this file is of type string"):
        file.predict(FRESH.assign(city=5))
    with pytest.raises(AttributeError, match="it holds predict"):
        file.transform(FRESH)


@needs_onnx
def test_a_pipeline_over_an_array_takes_one_array(tmp_path: Path):
    import onnxruntime

    x = FRESH[["rooms"]].to_numpy(float) + np.arange(3)
    source = make_pipeline(StandardScaler(), LogisticRegression()).fit(x, LABELS)
    path = export_onnx(translate(source, dtype=torch.float32), tmp_path / "m.onnx", columns=True)
    label, probabilities = onnxruntime.InferenceSession(path).run(None, {"X": x})
    assert (label == source.predict(x)).all()
    np.testing.assert_allclose(probabilities, source.predict_proba(x), atol=1e-5)
    assert (load_onnx(path).predict(x) == source.predict(x)).all()


@needs_onnx
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_boosted_trees_are_summed_by_their_node(dtype: torch.dtype, tmp_path: Path):
    import onnx

    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32).astype(np.float64)
    three = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0.5)
    source = LGBMClassifier(n_estimators=7, min_child_samples=3, verbose=-1).fit(x, three)
    path = export_onnx(translate(source, dtype=dtype), tmp_path / "m.onnx", columns=True)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("TreeEnsemble") == 1
    assert "CumSum" not in kinds, "sums are the node's own"
    file = load_onnx(path)
    atol = 1e-14 if dtype is torch.float64 else 1e-5
    np.testing.assert_allclose(file.predict_proba(x), source.predict_proba(x), rtol=0, atol=atol)
    with pytest.raises(InvalidInputError, match="too large for dtype") if dtype is torch.float32 else nullcontext():
        file.predict(x * 1e300)


@needs_onnx
def test_what_no_file_can_hold_is_refused_by_name(tmp_path: Path):
    own = make_pipeline(make_column_transformer((FunctionTransformer(np.cosh), ["age"])), Ridge())
    source = own.fit(TRAIN.fillna(0.0), TRAIN.rooms)
    module = translate(source, TRAIN.fillna(0.0))
    with pytest.raises(InvalidInputError, match=r"FunctionTransformer \(.*--packed"):
        export_onnx(module, tmp_path / "m.onnx", columns=True)
    for name, says in [("tfidf", "splits text"), ("hashed", "hashes categories"), ("outputs", "several outputs")]:
        with pytest.raises(InvalidInputError, match=says):
            export_onnx(translate(fitted(name, TEXT_SOURCES[name])), tmp_path / "m.onnx", columns=True)
    spelt = TRAIN.assign(city=["nan", np.nan, "Oslo"] * 20)
    both = make_pipeline(make_column_transformer((OneHotEncoder(), ["city"])), Ridge()).fit(spelt, TRAIN.rooms)
    with pytest.raises(InvalidInputError, match="'nan' is a category and missing cells have a code"):
        export_onnx(translate(both), tmp_path / "m.onnx", columns=True)


@pytest.mark.parametrize("name", ["logistic", "tfidf", "characters", "counts"])
def test_imputed_and_split_texts_are_saved_as_data(name: str, tmp_path: Path):
    source = fitted(name, (SOURCES | TEXT_SOURCES)[name])
    module = translate(source)
    assert module.frontend.fallbacks == ()
    again = load(save(module, tmp_path / "folder"))
    for rows in (TRAIN, FRESH, TEXTS):
        same([again.predict(rows)], expected(source, rows)[:1])
    export_pt2(module, tmp_path / "m.pt2", methods=["predict"])
    same([load_pt2(tmp_path / "m.pt2").predict(TEXTS)], expected(source, TEXTS)[:1])


@pytest.mark.parametrize("marker", [np.nan, None, "", "Rom"])
@pytest.mark.parametrize(
    "cells", [["Oslo", "Rom"], ["Oslo", None], ["Oslo", np.nan], ["", "Rom"], [1.5, "Rom"], [True, ""]]
)
def test_an_imputer_of_text_fills_and_refuses_as_the_source(marker: Any, cells: list[Any]):
    train = TRAIN.assign(city=["Oslo", "Rom", ""] * 20)
    imputer = SimpleImputer(strategy="most_frequent", missing_values=marker)
    encoded = make_pipeline(imputer, OneHotEncoder(handle_unknown="ignore", sparse_output=False))
    source = make_pipeline(make_column_transformer((encoded, ["city"])), Ridge()).fit(train, train.rooms)
    module = translate(source)
    rows = FRESH.assign(city=pd.Series((cells * 60)[:60], dtype=object))
    try:
        wanted = source.predict(rows)
    except ValueError:
        with pytest.raises(InvalidInputError):
            module.predict(rows)
    else:
        np.testing.assert_allclose(module.predict(rows), wanted, atol=1e-12)
