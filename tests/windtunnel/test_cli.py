"""``mlsys windtunnel inspect`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import joblib
import numpy as np
import pytest
import skops.io
from lightgbm import LGBMClassifier
from mlsys_core.cli.main import run
from sklearn.compose import make_column_transformer
from sklearn.ensemble import VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

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
    assert "3 trees with" in out
    assert "StandardScaler" in out


def test_json(file: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["windtunnel", "inspect", str(file), "--trust", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["input"] == {"width": 3, "columns": None}
    kinds = [operator["kind"] for operator in report["operators"]]
    assert kinds == ["select", "transform", "select", "concatenate", "predict"], "passthrough is an edge"
    assert report["operators"][2]["columns"] == [1]
    assert report["output"] == report["operators"][-1]["name"] == "lgbmclassifier"
    booster = joblib.load(file)[-1].booster_
    assert report["operators"][-1]["leaves"] == booster.trees_to_dataframe()["left_child"].isna().sum()


def test_members_of_a_meta_estimator_are_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parts = [("line", LogisticRegression()), ("wide", make_pipeline(StandardScaler(), LogisticRegression()))]
    joblib.dump(VotingClassifier(parts, voting="soft").fit(X, y), tmp_path / "vote.joblib")
    assert run(["windtunnel", "inspect", str(tmp_path / "vote.joblib"), "--trust", "--json"]) == 0
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
    assert run(["windtunnel", "inspect", str(tmp_path / "vote.joblib"), "--trust"]) == 0
    assert "4 operators, 17 parameters" in capsys.readouterr().out, "a member's parameters are counted once"


def test_errors_are_one_line(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.skops").write_bytes(b"PK nonsense")
    skops.io.dump({"not": "an estimator"}, tmp_path / "dict.skops")
    for arguments, says in [
        ([str(file)], "pass --trust"),
        ([str(tmp_path / "bad.skops")], "cannot be loaded"),
        ([str(tmp_path / "dict.skops")], "expected a fitted scikit-learn estimator and got dict"),
    ]:
        assert run(["windtunnel", "inspect", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert says in captured.err
        assert captured.err.count("\n") == 1
