"""``.pt2`` and ONNX files answer as the module does, for any number of rows, and without scikit-learn."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightgbm import LGBMClassifier, LGBMRegressor
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.onnx import export_onnx, load_onnx
from mlsys_windtunnel.export.pt2 import HOST_FILE, export_pt2, load_pt2
from mlsys_windtunnel.modules.tree.trees import Trees
from sklearn.compose import make_column_transformer
from sklearn.ensemble import AdaBoostRegressor, IsolationForest, RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier, SGDOneClassSVM
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, QuantileTransformer, StandardScaler
from sklearn.tree import DecisionTreeRegressor

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="needs pip install 'mlsys-windtunnel[onnx]' onnxruntime")
FORMATS = [
    pytest.param(("pt2", export_pt2, load_pt2), id="pt2"),
    pytest.param(("onnx", export_onnx, load_onnx), id="onnx", marks=needs_onnx),
]

rng = np.random.default_rng(0)
FRAME = pd.DataFrame({"a": rng.normal(size=80), "b": rng.normal(size=80), "c": rng.choice(["x", "y", "z"], 80)})
LABELS = np.where(FRAME.a > 0.5, "high", np.where(FRAME.c == "x", "x", "low"))


@pytest.fixture(scope="module")
def source() -> Any:
    columns = make_column_transformer((StandardScaler(), ["a", "b"]), (OneHotEncoder(handle_unknown="ignore"), ["c"]))
    return make_pipeline(columns, LogisticRegression()).fit(FRAME, LABELS)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_file_answers_raw_rows_as_the_source_does(form: Any, dtype: torch.dtype, source: Any, tmp_path: Path):
    suffix, export, load = form
    module = translate(source, dtype=dtype)
    file = load(export(module, tmp_path / f"m.{suffix}", methods=["predict", "predict_proba", "decision_function"]))
    assert file.answers == ("predict", "predict_proba", "decision_function")
    for frame in (FRAME, FRAME[:1], FRAME.assign(c="unseen")):
        assert (file.predict(frame) == source.predict(frame)).all()
        atol = 1e-12 if dtype is torch.float64 else 1e-5
        np.testing.assert_allclose(file.predict_proba(frame), source.predict_proba(frame), atol=atol)
        np.testing.assert_allclose(file.decision_function(frame), source.decision_function(frame), atol=10 * atol)
    assert file.classes_.tolist() == source.classes_.tolist()
    with pytest.raises(AttributeError, match="no transform; it holds predict"):
        file.transform(FRAME)
    with pytest.raises(InvalidInputError, match="lacks the columns"):
        file.predict(FRAME[["a"]])
    with pytest.raises(InvalidInputError, match="no rows"):
        file.predict(FRAME[:0])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("estimator", [LinearRegression(), RidgeClassifier(), SGDOneClassSVM(), StandardScaler()])
def test_shapes_are_those_of_the_source(form: Any, estimator: Any, tmp_path: Path):
    suffix, export, load = form
    x = FRAME[["a", "b"]].to_numpy()
    source = estimator.fit(x, (x[:, 0] > 0).astype(int))
    method = "predict" if hasattr(source, "predict") else "transform"
    file = load(export(translate(source), tmp_path / f"m.{suffix}", methods=[method]))
    expected = getattr(source, method)(x)
    got = getattr(file, method)(x)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "estimator",
    [
        LGBMClassifier(n_estimators=7, num_leaves=6, min_child_samples=3, verbose=-1),
        RandomForestClassifier(5, max_depth=6, random_state=0),
        QuantileTransformer(n_quantiles=20),
    ],
)
def test_trees_and_searches_export(form: Any, estimator: Any, tmp_path: Path):
    suffix, export, load = form
    x = FRAME[["a", "b"]].to_numpy()
    source = estimator.fit(x, LABELS)
    methods = ["predict", "predict_proba"] if hasattr(source, "predict") else ["transform"]
    file = load(export(translate(source), tmp_path / f"m.{suffix}", methods=methods))
    fresh = np.vstack([np.random.default_rng(1).normal(size=(300, 2)), x])  # x itself: ties at thresholds
    for method in methods:
        expected, got = getattr(source, method)(fresh), getattr(file, method)(fresh)
        assert (got == expected).all() if method == "predict" else np.allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.quick_cases(2)
@needs_onnx
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in ("boosted", "forest", "median", "categories", "constant")),
        ("boosted", torch.float32),
    ],
)
def test_trees_are_one_node_of_onnx_and_take_the_same_branches(name: str, dtype: torch.dtype, tmp_path: Path):
    import onnx

    x = np.column_stack([FRAME[["a", "b"]].to_numpy(), np.random.default_rng(1).integers(0, 40, 80)])
    x[::9, 0] = np.nan
    number = np.nan_to_num(x[:, 0]) + x[:, 1] * (x[:, 2] % 3)
    source, y = {
        "boosted": (LGBMClassifier(n_estimators=9, num_leaves=7, min_child_samples=3, verbose=-1), LABELS),
        "forest": (RandomForestClassifier(9, random_state=0), LABELS),
        "median": (AdaBoostRegressor(n_estimators=5, random_state=0), number),
        "categories": (
            LGBMRegressor(n_estimators=9, num_leaves=7, min_child_samples=3, cat_smooth=0, cat_l2=0, verbose=-1),
            number,
        ),
        "constant": (DecisionTreeRegressor(max_depth=1), np.ones(80)),
    }[name]
    x = np.nan_to_num(x) if name == "median" else x
    source.fit(x, y, **({"categorical_feature": [2]} if name == "categories" else {}))
    module = translate(source, dtype=dtype)
    path = export_onnx(module, tmp_path / "m.onnx", methods=["predict"])
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert nodes.count("TreeEnsemble") == 1
    assert "Loop" not in nodes
    trees = next(part for part in module.modules() if isinstance(part, Trees))
    fresh = np.vstack([x, np.random.default_rng(2).normal(size=(200, 3)) * [1, 1, 30]])
    for row, split in enumerate(range(len(trees.feature))):  # ties at thresholds, and the next numbers
        fresh[row % 200, trees.feature[split]] = trees.threshold[split].item()
    fresh[5::11, 2] = np.nan if name in ("boosted", "categories") else 2.5
    fresh[np.isinf(fresh)] = 1e30  # the threshold of a split between missing values and all others; refused as input
    expected = module.predict(fresh)
    got = load_onnx(path, num_threads=1).predict(fresh)
    assert (got == expected).all() if expected.dtype.kind == "U" else np.allclose(got, expected, rtol=0, atol=1e-5)
    if dtype is torch.float64 and expected.dtype.kind == "f":
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", FORMATS)
def test_several_outputs_keep_their_labels(form: Any, tmp_path: Path):
    suffix, export, load = form
    x = FRAME[["a", "b"]].to_numpy()
    labels = np.stack([np.where(x[:, 0] > 0, "a", "b"), LABELS], axis=1)
    source = MultiOutputClassifier(LogisticRegression()).fit(x, labels)
    file = load(export(translate(source), tmp_path / f"m.{suffix}", methods=["predict", "predict_proba"]))
    assert (file.predict(x) == source.predict(x)).all()
    for got, expected in zip(file.predict_proba(x), source.predict_proba(x), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)


@needs_onnx
def test_numbers_of_onnx_files_are_not_rounded(tmp_path: Path):
    x = FRAME[["a", "b"]].to_numpy()
    source = IsolationForest(n_estimators=5, random_state=0).fit(x)  # divides by a constant of many digits
    file = load_onnx(export_onnx(translate(source), tmp_path / "m.onnx", methods=["decision_function"]))
    np.testing.assert_allclose(file.decision_function(x), source.decision_function(x), rtol=0, atol=1e-14)


def test_pt2_runs_on_torch_alone_in_a_fresh_process(source: Any, tmp_path: Path):
    module = translate(source)
    export_pt2(module, tmp_path / "m.pt2")
    packed = module.encode(FRAME)
    np.save(tmp_path / "x.npy", packed)
    script = (
        "import sys, numpy as np, torch\n"
        "program = torch.export.load('m.pt2').module()\n"
        "x = torch.from_numpy(np.load('x.npy'))\n"
        "np.save('all.npy', program(x).detach().numpy())\n"
        "np.save('one.npy', program(x[:1]).detach().numpy())\n"
        "assert not {'sklearn', 'mlsys_windtunnel'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    expected = module(torch.from_numpy(packed)).detach().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "all.npy"), expected, atol=1e-14)
    np.testing.assert_allclose(np.load(tmp_path / "one.npy"), expected[:1], atol=1e-14)


def test_exporting_leaves_the_mode_as_it_was(source: Any, tmp_path: Path):
    module = translate(source).train()
    export_pt2(module, tmp_path / "m.pt2")
    assert module.training


def test_fallback_operators_leave_a_program_for_the_packed_table(tmp_path: Path):
    x = FRAME[["a", "b"]].to_numpy()
    source = make_pipeline(FunctionTransformer(np.cosh), LinearRegression()).fit(x, x[:, 0])
    module = translate(source, x)
    export_pt2(module, tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2").module()
    answer = program(torch.from_numpy(module.encode(x))).detach().numpy()[:, 0]
    np.testing.assert_allclose(answer, source.predict(x), atol=1e-12)
    with pytest.raises(InvalidInputError, match=r"FunctionTransformer runs on the host"):
        load_pt2(tmp_path / "m.pt2")


def test_bad_arguments_are_refused(source: Any, tmp_path: Path):
    module = translate(source)
    with pytest.raises(InvalidInputError, match=r"ends in \.pt2"):
        export_pt2(module, tmp_path / "m.onnx")
    for methods in (["score_samples"], []):
        with pytest.raises(InvalidInputError, match="this module has predict, predict_proba"):
            export_pt2(module, tmp_path / "m.pt2", methods=methods)
    with pytest.raises(InvalidInputError, match="cannot be written"):
        export_pt2(module, tmp_path / "no" / "such" / "folder" / "m.pt2")


def test_files_that_are_none_of_ours_are_refused(source: Any, tmp_path: Path):
    (tmp_path / "text.pt2").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "zip.pt2", "w") as archive:
        archive.writestr("hello", "world")
    other = torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(2, 1),))
    torch.export.save(other, tmp_path / "other.pt2")
    torch.export.save(other, tmp_path / "bad.pt2", extra_files={HOST_FILE: '{"format": "x"}'})
    for name, says in [
        ("missing.pt2", "there is no file"),
        ("text.pt2", "no zip archive"),
        ("zip.pt2", "cannot be read safely"),
        ("other.pt2", "not written by WindTunnel"),
        ("bad.pt2", "description is damaged"),
    ]:
        with pytest.raises(InvalidInputError, match=says):
            load_pt2(tmp_path / name)


@needs_onnx
def test_a_bit_that_flips_in_an_onnx_file_is_noticed(tmp_path: Path):
    x = np.random.default_rng(0).normal(size=(80, 3))
    source = LogisticRegression().fit(x, x[:, 0] > 0)
    path = export_onnx(translate(source), tmp_path / "m.onnx", columns=True)
    data = path.read_bytes()
    for place in np.random.default_rng(1).choice(len(data), 60, replace=False):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << int(place) % 8]) + data[place + 1 :])
        try:
            file = load_onnx(path)
        except InvalidInputError:
            continue
        np.testing.assert_array_equal(file.predict(x), source.predict(x))
        assert place >= len(data) - 76, "only the checksum itself may be lost"


@needs_onnx
def test_normal_quantiles_go_to_onnx_exactly(tmp_path: Path):
    x = np.random.default_rng(0).gamma(2, size=(300, 3))
    source = QuantileTransformer(n_quantiles=150, output_distribution="normal").fit(x)
    file = load_onnx(export_onnx(translate(source), tmp_path / "m.onnx", columns=True))
    asked = np.concatenate([x, x.min(axis=0)[None] - 1, x.max(axis=0)[None] + 1, x * 0.5])
    np.testing.assert_allclose(file.transform(asked), source.transform(asked), rtol=1e-12, atol=1e-13)


@needs_onnx
def test_onnx_files_that_are_none_of_ours_are_refused(tmp_path: Path):
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        load_onnx(tmp_path / "text.onnx")
    with pytest.raises(InvalidInputError, match="not a file"):
        load_onnx(tmp_path / "missing.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_missing_packages_are_named_with_the_command(package: str, source: Any, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", sys)  # present, unless it is the one that is missing
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"package {package}: pip install 'mlsys-windtunnel\[onnx\]'"):
        export_onnx(translate(source), tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match="pip install onnxruntime"):
        load_onnx(tmp_path / "m.onnx")


@needs_onnx
@pytest.mark.parametrize("first", ["passes", "logarithm"])
def test_what_is_refused_within_is_refused_by_packed_files(first: str, tmp_path: Path) -> None:
    """Scaled columns side by side, and -inf that a step makes: the input's own numbers do not show either."""
    x = np.random.default_rng(0).uniform(1, 9, (60, 2))
    y = x[:, 0] > 5
    scaled = make_column_transformer((StandardScaler(), [0]), remainder="passthrough")
    steps = [scaled] if first == "passes" else [FunctionTransformer(np.log1p)]
    source = make_pipeline(*steps, LogisticRegression()).fit(x, y)
    module = translate(source)
    bad = x[:3].copy()
    bad[1, 0] = np.nan if first == "passes" else -1.0
    files = (
        load_onnx(export_onnx(module, tmp_path / "m.onnx", methods=["predict"])),
        load_pt2(export_pt2(module, tmp_path / "m.pt2", methods=["predict"])),
        load_onnx(export_onnx(module, tmp_path / "columns.onnx", columns=True)),
    )
    for file in files:
        assert (file.predict(x) == source.predict(x)).all()
        with pytest.raises(InvalidInputError, match="LogisticRegression"):
            file.predict(bad)
