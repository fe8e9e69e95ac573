"""``mlsys windtunnel fine-tune`` from files to a folder."""

from __future__ import annotations

from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.cli.main import app
from mlsys_windtunnel.export.artifact import load
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

FRAME = pd.DataFrame({"a": np.arange(200.0) % 17, "b": np.arange(200.0) % 7})
TARGET = np.where(FRAME.a + FRAME.b > 12, "yes", "no")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pipeline and rows."""
    joblib.dump(LogisticRegression(C=1e-3).fit(FRAME, TARGET), tmp_path / "source.joblib")
    FRAME.assign(label=TARGET, more=1).to_csv(tmp_path / "rows.csv", index=False)
    return tmp_path


def arguments(folder: Path, *more: str) -> list[str]:
    files = [str(folder / name) for name in ("source.joblib", "rows.csv")]
    return ["fine-tune", *files, "-o", str(folder / "tuned"), "--trust-code", "--target", "label", *more]


def test_a_pipeline_is_trained_and_written_and_trained_further(folder: Path) -> None:
    result = CliRunner().invoke(app, arguments(folder, "--epochs", "3", "--lr", "0.05"), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "epoch  3" in result.output
    assert load(folder / "tuned").predict_proba(FRAME).shape == (200, 2)
    again = arguments(folder, "--epochs", "1")
    again[1] = str(folder / "tuned")
    assert CliRunner().invoke(app, again, catch_exceptions=False).exit_code == 0


def test_the_certainty_of_a_gain_is_an_option(folder: Path) -> None:
    other = LogisticRegression().fit(FRAME, np.where(FRAME.a > 8, "yes", "no"))  # knows nothing of b yet
    joblib.dump(other, folder / "source.joblib")
    kept = {}
    for least in ("0", "1000"):
        steps = ("--epochs", "5", "--lr", "0.05", "--batch-size", "16")
        more = (*steps, "--eval", str(folder / "rows.csv"), "--min-gain-se", least)
        kept[least] = CliRunner().invoke(app, arguments(folder, *more), catch_exceptions=False).output
    assert ": epoch" in kept["0"]
    assert ": the source itself" in kept["1000"]


@pytest.mark.parametrize(
    ("more", "message"),
    [(["--lr", "-1"], "lr is"), (["--target", "none"], "no column 'none'"), (["--loss", "huber"], "log_loss")],
    ids=["rate", "target", "loss"],
)
def test_bad_input_is_refused_before_work(folder: Path, more: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments(folder, *more))
    assert isinstance(result.exception, InvalidInputError)
    assert message in str(result.exception)
    assert not (folder / "tuned").exists()


def test_help_tells_what_levels_train() -> None:
    assert "thresholds" in CliRunner().invoke(app, ["fine-tune", "--help"]).output
