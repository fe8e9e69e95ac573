"""``mlsys windtunnel inspect|translate|predict`` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import joblib
import networkx as nx
import numpy as np
import pandas as pd
import pytest
import skops.io
from lightgbm import LGBMClassifier
from mlsys_core.cli.main import run
from mlsys_windtunnel.cli.translate import differences
from sklearn.compose import ColumnTransformer, make_column_transformer
from sklearn.ensemble import VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

X = np.random.default_rng(0).normal(size=(60, 3))
y = (X[:, 0] > 0).astype(int)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    columns = make_column_transformer((StandardScaler(), [0, 2]), remainder="passthrough")
    model = LGBMClassifier(n_estimators=3, num_leaves=4, min_child_samples=5, verbose=-1)
    path = tmp_path_factory.mktemp("models") / "pipe.joblib"
    joblib.dump(make_pipeline(columns, model).fit(X, y), path)
    return path


def test_table(file: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["windtunnel", "inspect", str(file), "--trust"]) == 0
    out = capsys.readouterr().out
    assert "5 operators" in out
    assert "StandardScaler" in out


def test_json(file: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["windtunnel", "inspect", str(file), "--trust-code", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["input"] == {"width": 3, "columns": None}
    kinds = [operator["kind"] for operator in report["operators"]]
    assert kinds == ["select", "transform", "select", "concatenate", "predict"], "passthrough is an edge"
    assert report["operators"][2]["columns"] == [1]
    assert report["output"] == report["operators"][-1]["name"] == "lgbmclassifier"


def test_graph(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    written = tmp_path / "pipe.graphml"
    options = ["--trust-code", "--json", "--graph", str(written)]
    assert run(["windtunnel", "inspect", str(file), *options]) == 0
    out = capsys.readouterr()
    assert f"wrote {written}" in out.err
    names = [operator["name"] for operator in json.loads(out.out)["operators"]]
    assert list(nx.read_graphml(written)) == ["input", *names]
    assert run(["windtunnel", "inspect", str(file), "--graph", str(tmp_path / "pipe.gif")]) == 2


def test_members_of_a_meta_estimator_are_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parts = [("line", LogisticRegression()), ("wide", make_pipeline(StandardScaler(), LogisticRegression()))]
    joblib.dump(VotingClassifier(parts, voting="soft").fit(X, y), tmp_path / "vote.joblib")
    assert run(["windtunnel", "inspect", str(tmp_path / "vote.joblib"), "--trust-code", "--json"]) == 0
    operators = json.loads(capsys.readouterr().out)["operators"]
    assert [operator["name"] for operator in operators] == [
        "line",
        "wide/standardscaler",
        "wide/logisticregression",
        "votingclassifier",
    ]
    assert operators[-1]["kind"] == "combine"
    assert operators[-1]["inputs"] == ["line", "wide/logisticregression"]
    assert [operator["methods"] for operator in operators] == [["predict_proba"], [], ["predict_proba"], []]
    assert run(["windtunnel", "inspect", str(tmp_path / "vote.joblib"), "--trust-code"]) == 0
    assert "4 operators" in capsys.readouterr().out


def test_errors_are_one_line(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.skops").write_bytes(b"PK nonsense")
    skops.io.dump({"not": "an estimator"}, tmp_path / "dict.skops")
    for arguments, says in [
        ([str(file)], "pass --trust-code"),
        ([str(tmp_path / "bad.skops")], "cannot be loaded"),
        ([str(tmp_path / "dict.skops")], "expected a fitted scikit-learn estimator and got dict"),
    ]:
        assert run(["windtunnel", "inspect", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert says in captured.err
        assert captured.err.count("\n") == 1


@pytest.fixture(scope="module")
def churn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pipeline on named columns, of which one is text that looks like numbers, and rows for it."""
    folder = tmp_path_factory.mktemp("churn")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.normal(40, 9, 90),
            "zip": rng.choice(["01234", "10115", "99999"], 90),
            "noise": 'unused, and "quoted"',
        }
    )
    target = np.where(frame.age > 45, "stay", np.where(frame.zip == "01234", "go", "ask"))
    columns = ColumnTransformer([("n", StandardScaler(), ["age"]), ("z", OneHotEncoder(), ["zip"])])
    source = Pipeline([("columns", columns), ("model", LogisticRegression())]).fit(frame[["age", "zip"]], target)
    skops.io.dump(source, folder / "churn.skops")
    frame[["noise", "zip", "age"]].to_csv(folder / "rows.csv", index=False)
    frame.to_parquet(folder / "rows.parquet")
    return folder


def test_translate_shows_checks_and_writes(churn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [str(churn / "churn.skops"), "-o", str(tmp_path / "churn"), "--pt2", str(tmp_path / "churn.pt2")]
    assert run(["windtunnel", "translate", *arguments, "--check", str(churn / "rows.csv")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4 of 6 operators in the network, 29 trainable parameters" in out
    assert "host: its categories are looked up there" in out
    assert "host: picks columns of the raw table" in out
    assert out.count("90 rows against the source") == 3, "of the module, the folder and the program"
    assert f"wrote {tmp_path / 'churn'} " in out


@pytest.mark.parametrize("data", ["rows.csv", "rows.parquet"])
@pytest.mark.parametrize("model", ["churn", "churn.pt2"])
def test_predict_answers_as_the_source(churn: Path, tmp_path: Path, data: str, model: str):
    option = "-o" if model == "churn" else "--pt2"
    assert run(["windtunnel", "translate", str(churn / "churn.skops"), option, str(tmp_path / model)]) == 0
    arguments = [str(tmp_path / model), str(churn / data), "-o", str(tmp_path / "answers.csv"), "--proba"]
    assert run(["windtunnel", "predict", *arguments]) == 0
    answers = pd.read_csv(tmp_path / "answers.csv")
    source = skops.io.load(churn / "churn.skops")
    frame = pd.read_parquet(churn / "rows.parquet")[["age", "zip"]]
    assert list(answers.columns) == ["prediction", *(f"probability of {label}" for label in ("ask", "go", "stay"))]
    assert answers.prediction.tolist() == source.predict(frame).tolist()
    np.testing.assert_allclose(answers.iloc[:, 1:], source.predict_proba(frame), atol=1e-12)


def test_predict_in_parts_and_without_names(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlsys_windtunnel.cli.predict.ROWS_AT_ONCE", 7)
    pd.DataFrame(X).to_parquet(tmp_path / "rows.parquet")
    assert run(["windtunnel", "translate", str(file), "--trust-code", "-o", str(tmp_path / "model")]) == 0
    arguments = [str(tmp_path / "model"), str(tmp_path / "rows.parquet"), "-o", str(tmp_path / "answers.parquet")]
    assert run(["windtunnel", "predict", *arguments]) == 0
    assert pd.read_parquet(tmp_path / "answers.parquet").prediction.tolist() == joblib.load(file).predict(X).tolist()


def test_a_transformer_gives_features(tmp_path: Path):
    skops.io.dump(StandardScaler().fit(X), tmp_path / "scale.skops")
    pd.DataFrame(X).to_csv(tmp_path / "rows.csv", index=False)
    assert run(["windtunnel", "translate", str(tmp_path / "scale.skops"), "-o", str(tmp_path / "scale")]) == 0
    assert (
        run(
            [
                "windtunnel",
                "predict",
                *(str(tmp_path / name) for name in ("scale", "rows.csv")),
                "-o",
                str(tmp_path / "out.csv.gz"),
            ]
        )
        == 0
    )
    np.testing.assert_allclose(pd.read_csv(tmp_path / "out.csv.gz"), StandardScaler().fit_transform(X), atol=1e-12)


def test_fallback_parts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = Pipeline([("f", FunctionTransformer(np.cosh)), ("m", LogisticRegression())]).fit(X, y)
    joblib.dump(source, tmp_path / "pipe.joblib")
    pd.DataFrame(X).to_csv(tmp_path / "rows.csv", index=False)
    options = ["--trust-code", "--example", str(tmp_path / "rows.csv")]
    assert run(["windtunnel", "translate", str(tmp_path / "pipe.joblib"), *options]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "declines the function cosh" in out
    assert run(["windtunnel", "translate", str(tmp_path / "pipe.joblib"), *options, "-o", str(tmp_path / "x")]) == 2
    assert "FunctionTransformer cannot be saved" in capsys.readouterr().err


def test_answers_that_differ_are_an_error(churn: Path, tmp_path: Path, monkeypatch, capsys):
    from mlsys_windtunnel.cli import translate as cli_translate

    translated = cli_translate._translated

    def wrong(*args, **options):
        module, graph = translated(*args, **options)
        next(module.parameters()).data += 0.1
        return module, graph

    monkeypatch.setattr(cli_translate, "_translated", wrong)
    arguments = [str(churn / "churn.skops"), "--check", str(churn / "rows.csv"), "-o", str(tmp_path / "x")]
    assert run(["windtunnel", "translate", *arguments]) == 1
    assert "predict_proba" in (message := capsys.readouterr().err)
    assert "differ from the source by more than 1e-06" in message
    assert not (tmp_path / "x").exists(), "nothing is written"


def test_differences_know_infinities_and_nan():
    def answering(values):
        return types.SimpleNamespace(predict=lambda x: np.array(values))

    one = answering([1.0, np.inf, np.nan])
    assert differences(one, answering([1.5, np.inf, np.nan]), None) == {"predict": (0.5, 0)}
    assert differences(one, answering([1.0, np.inf, 0.0]), None) == {"predict": (np.inf, 0)}
    assert differences(answering(["a", "b"]), answering(["a", "c"]), None) == {"predict": (0.0, 1)}


def test_bad_input_is_one_line_before_any_work(churn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, rows, answers = tmp_path / "model", churn / "rows.csv", tmp_path / "answers.csv"
    assert run(["windtunnel", "translate", str(churn / "churn.skops"), "-o", str(model)]) == 0
    pd.read_csv(rows)[["age"]].to_csv(tmp_path / "short.csv", index=False)
    (tmp_path / "empty.csv").write_text("age,zip\n")
    (tmp_path / "broken.parquet").write_text("no parquet")
    capsys.readouterr()
    for arguments, says in [
        (["predict", model, tmp_path / "short.csv", "-o", answers], "lacks the columns ['zip']"),
        (["predict", model, tmp_path / "empty.csv", "-o", answers], "has no rows"),
        (["predict", model, tmp_path / "broken.parquet", "-o", answers], "cannot be read as a table"),
        (["predict", model, tmp_path / "missing.csv", "-o", answers], "is not a file"),
        (["predict", model, tmp_path / "rows.xlsx", "-o", answers], "ends in .csv"),
        (["predict", model, rows, "-o", tmp_path / "no" / "answers.csv"], "there is no folder"),
        (["predict", model, rows, "-o", tmp_path / "answers.txt"], "ends in .csv"),
        (["predict", tmp_path / "nowhere", rows, "-o", answers], "no folder, .pt2 or .onnx"),
        (["predict", tmp_path, rows, "-o", answers], "is no artifact"),
        (["predict", model, rows], "Missing option"),
        (["translate", churn / "churn.skops", "--pt2", tmp_path / "x.onnx"], "must end in .pt2"),
        (["translate", churn / "churn.skops", "--onnx", tmp_path / "no" / "x.onnx"], "there is no folder"),
        (["translate", churn / "churn.skops", "-o", rows], "is a file"),
        (["translate", churn / "churn.skops", "--check", tmp_path / "short.csv"], "lacks the columns ['zip']"),
        (["translate", tmp_path / "missing.skops"], "is not a file"),
    ]:
        assert run(["windtunnel", *map(str, arguments)]) == 2, arguments
        error = capsys.readouterr().err
        assert says in error, (arguments, error)
        assert error.count("\n") == 1
    assert not answers.exists()
    assert not list(tmp_path.glob(".*partial"))


def test_help_teaches_and_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from mlsys_core.cli.main import run\n"
        "assert run(['windtunnel', 'translate', '--help']) == 0\n"
        "assert not {'torch', 'sklearn', 'pandas'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "mlsys windtunnel translate churn.skops -o churn --check customers.parquet" in " ".join(done.stdout.split())
