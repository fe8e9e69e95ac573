"""Files: safe by default, and refused in words when damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import skops.io
from lightgbm import LGBMClassifier
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import load_estimator
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

X = np.random.default_rng(0).normal(size=(40, 3))
y = (X[:, 0] > 0).astype(int)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)


def halve(rows: Any) -> Any:
    return rows / 2


def test_skops_needs_no_trust(tmp_path: Path, pipe: Pipeline):
    skops.io.dump(pipe, tmp_path / "pipe.skops")
    loaded = load_estimator(tmp_path / "pipe.skops")
    np.testing.assert_array_equal(loaded.predict_proba(X), pipe.predict_proba(X))


@pytest.mark.parametrize("suffix", [".joblib", ".pkl", ".pickle"])
def test_pickles_need_trust(tmp_path: Path, pipe: Pipeline, suffix: str):
    file = tmp_path / f"pipe{suffix}"
    joblib.dump(pipe, file)
    with pytest.raises(InvalidInputError, match=r"any code while it loads.*--trust-code"):
        load_estimator(file)
    np.testing.assert_array_equal(load_estimator(file, trust_code=True).predict(X), pipe.predict(X))


def test_untrusted_types_are_listed(tmp_path: Path):
    model = make_pipeline(FunctionTransformer(halve), RandomForestClassifier(2)).fit(X, y)
    skops.io.dump(model, tmp_path / "model.skops")
    with pytest.raises(InvalidInputError, match=r"not trusted.*: [\w.]*halve; .*--trust-code"):
        load_estimator(tmp_path / "model.skops")


def test_trust_loads_untrusted_types(tmp_path: Path):
    model = make_pipeline(FunctionTransformer(halve), RandomForestClassifier(2)).fit(X, y)
    skops.io.dump(model, tmp_path / "model.skops")
    loaded = load_estimator(tmp_path / "model.skops", trust_code=True)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))


def test_a_native_model_in_skops_needs_trust(tmp_path: Path):
    skops.io.dump(LGBMClassifier(n_estimators=2, verbose=-1).fit(X, y), tmp_path / "model.skops")
    with pytest.raises(InvalidInputError, match=r"native code: lightgbm\.basic\.Booster, .*--trust-code"):
        load_estimator(tmp_path / "model.skops")


@pytest.mark.parametrize("suffix", [".skops", ".joblib"])
def test_damaged_files_are_refused(tmp_path: Path, pipe: Pipeline, suffix: str):
    file = tmp_path / f"pipe{suffix}"
    if suffix == ".skops":
        skops.io.dump(pipe, file)
    else:
        joblib.dump(pipe, file)
    whole = file.read_bytes()
    for damaged in (b"", b"nonsense", whole[: len(whole) // 2], whole[10:]):
        file.write_bytes(damaged)
        with pytest.raises(InvalidInputError, match="cannot be loaded"):
            load_estimator(file, trust_code=True)


def test_other_files_are_refused(tmp_path: Path):
    with pytest.raises(InvalidInputError, match="is not a file"):
        load_estimator(tmp_path / "none.skops")
    with pytest.raises(InvalidInputError, match="is not a file"):
        load_estimator(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(InvalidInputError, match=r"cannot load \.onnx; give \.skops"):
        load_estimator(tmp_path / "model.onnx")
