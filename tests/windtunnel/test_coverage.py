"""The coverage page is what the table says, and every line of it goes through all three ways of saving."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlsys_windtunnel.cli.translate import differences
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import load, save
from mlsys_windtunnel.export.onnx import export_onnx, load_onnx
from mlsys_windtunnel.export.program import default_methods
from mlsys_windtunnel.export.pt2 import export_pt2, load_pt2
from mlsys_windtunnel.parse.boosters import as_estimator
from sklearn.gaussian_process.kernels import Matern
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.tree import DecisionTreeClassifier

_SPEC = importlib.util.spec_from_file_location(
    "windtunnel_coverage", Path(__file__).parents[2] / "scripts" / "windtunnel_coverage.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
coverage = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(coverage)

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
SOURCES = [entry.source for entry in coverage.covered()]

rng = np.random.default_rng(0)
X = np.abs(rng.normal(size=(60, 4)))
X[:, 3] = rng.integers(0, 3, 60)
Y = (X[:, 0] > 0.6).astype(int) + (X[:, 1] > 0.9)

TWO = [("a", LogisticRegression()), ("b", DecisionTreeClassifier(max_depth=2))]
OF_CLASSIFIERS = ("OneVsOneClassifier", "OneVsRestClassifier", "OutputCodeClassifier", "ClassifierChain")
THRESHOLDS = ("FixedThresholdClassifier", "TunedThresholdClassifierCV")
SELECTORS = ("RFE", "RFECV", "SequentialFeatureSelector")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "CalibratedClassifierCV": {"estimator": LogisticRegression()},
    "FrozenEstimator": {"estimator": LogisticRegression().fit(X, Y)},
    "FunctionTransformer": {"func": np.log1p},
    "GaussianProcessRegressor": {
        "kernel": Matern(nu=2.5),
        "alpha": 0.1,
    },  # without noise its weights are too large to compare answers
    "GaussianRandomProjection": {"n_components": 2},
    "KernelPCA": {"kernel": "rbf"},
    "KNeighborsClassifier": {"weights": "distance"},
    "MultiOutputClassifier": {"estimator": LogisticRegression()},
    "MultiOutputRegressor": {"estimator": LinearRegression()},
    "LocalOutlierFactor": {"novelty": True},
    "RadiusNeighborsClassifier": {"outlier_label": "most_frequent"},
    "RegressorChain": {"estimator": LinearRegression()},
    "SGDClassifier": {"loss": "modified_huber"},
    "SelfTrainingClassifier": {"estimator": LogisticRegression()},
    "SelectFromModel": {"estimator": DecisionTreeClassifier()},
    "SparseRandomProjection": {"n_components": 2},
    "StackingClassifier": {"estimators": TWO},
    "StackingRegressor": {"estimators": [("a", LinearRegression())]},
    "TransformedTargetRegressor": {"regressor": LinearRegression()},
    "VotingClassifier": {"estimators": TWO, "voting": "soft"},
    "VotingRegressor": {"estimators": [("a", LinearRegression())]},
    **{name: {"estimator": LogisticRegression()} for name in (*OF_CLASSIFIERS, *THRESHOLDS)},
    **{name: {"estimator": LinearRegression()} for name in SELECTORS},
}
SMALL = {"n_estimators": 3, "random_state": 0, "verbosity": 0}


def _target(name: str) -> np.ndarray:
    if name.startswith(("MultiTask", "PLS", "CCA")) or name in ("MultiOutputRegressor", "RegressorChain"):
        return np.stack([Y + 0.5, Y + 1.0], axis=1)
    if name in ("MultiOutputClassifier", "ClassifierChain"):
        return np.stack([Y > 0, Y > 1], axis=1).astype(int)
    return (Y > 0).astype(int) if name in THRESHOLDS else Y + 0.5 if name == "GammaRegressor" else Y


@pytest.fixture(scope="module", params=SOURCES)
def sample(request: pytest.FixtureRequest) -> tuple[str, Any, np.ndarray]:
    """A fitted estimator of each class of the table, and rows for it."""
    package, _, name = request.param.rpartition(".")
    if request.param in coverage.NOT_IN_LOCK:
        pytest.importorskip(package.partition(".")[0])
    if name == "Booster":
        return request.param, as_estimator(_booster(package.partition(".")[0])), X
    estimator = getattr(importlib.import_module(package), name)(**ARGUMENTS.get(name, {}))
    known = estimator.get_params()
    estimator.set_params(**{key: value for key, value in SMALL.items() if key in known})
    if name.startswith("LGBM"):
        estimator.set_params(verbose=-1)
    x = X[:, :1] if name == "IsotonicRegression" else X
    options: dict[str, Any] = {"group": [30, 30]} if name.endswith("Ranker") else {}
    return request.param, estimator.fit(x, _target(name), **options), x


def _booster(package: str) -> Any:
    library = importlib.import_module(package)
    if package == "lightgbm":
        return library.train({"objective": "multiclass", "num_class": 3, "verbose": -1}, library.Dataset(X, Y), 3)
    return library.train({"objective": "multi:softprob", "num_class": 3}, library.DMatrix(X, Y), 3)


def _check(source: Any, answering: Any, x: np.ndarray) -> None:
    found = differences(source, answering, x)
    assert found, "nothing is compared"
    assert all(apart <= 1e-6 and labels == 0 for apart, labels in found.values()), found


def test_every_operator_is_saved(sample: tuple[str, Any, np.ndarray], tmp_path: Path):
    _, source, x = sample
    _check(source, load(save(translate(source, x), tmp_path)), x)


@pytest.mark.slow
@pytest.mark.some_cases(16)
def test_every_operator_is_exported_to_pt2(sample: tuple[str, Any, np.ndarray], tmp_path: Path):
    _, source, x = sample
    module = translate(source, x)
    _check(source, load_pt2(export_pt2(module, tmp_path / "m.pt2", methods=default_methods(module))), x)


@pytest.mark.slow
@pytest.mark.some_cases(16)
@pytest.mark.skipif(not HAS_ONNX, reason="needs pip install 'mlsys-windtunnel[onnx]'")
def test_every_operator_is_exported_to_onnx(sample: tuple[str, Any, np.ndarray], tmp_path: Path):
    name, source, x = sample
    if name in coverage.NOT_IN_ONNX:
        pytest.skip(coverage.NOT_IN_ONNX[name])
    module = translate(source, x)
    _check(source, load_onnx(export_onnx(module, tmp_path / "m.onnx", methods=default_methods(module))), x)


def test_the_committed_page_is_what_the_script_writes():
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.page(), "run scripts/windtunnel_coverage.py"


def test_lists_name_operators_of_the_table():
    assert {*coverage.NOT_IN_LOCK, *coverage.NOT_IN_ONNX} <= set(SOURCES)
