"""Rows streamed from parquet files: all of them once an epoch, in an order that follows from the seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import fine_tune, translate
from mlsys_windtunnel.finetune.stream import ParquetRows, StreamedRows, fine_tune_stream
from sklearn.linear_model import LogisticRegression

FRAME = pd.DataFrame({"a": np.arange(300.0), "b": np.arange(300.0) % 7})
TARGET = ((FRAME.a % 13) > 6).astype(int)
MODULE = translate(LogisticRegression(max_iter=1000).fit(FRAME, TARGET))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Two files of groups of 40 rows; the weight is 2 for every third row."""
    table = FRAME.assign(label=TARGET, heavy=np.where(np.arange(300) % 3, 1.0, 2.0))
    files = [tmp_path / "first.parquet", tmp_path / "second.parquet"]
    for rows, file in zip((table[:170], table[170:]), files, strict=True):
        rows.to_parquet(file, row_group_size=40)
    return files


@pytest.mark.parametrize("buffer_rows", [1, 100, 10_000])
def test_an_epoch_gives_each_row_once_with_its_target_and_weight(paths: list[Path], buffer_rows: int) -> None:
    rows = StreamedRows(ParquetRows(paths, "label", "heavy", buffer_rows), MODULE)
    batches = list(rows.batches(32, seed=1, epoch=0))
    assert [len(batch) for batch in batches] == [32] * 9 + [12]
    index = np.concatenate([batch.x[:, 0].numpy() for batch in batches]).astype(int)
    assert sorted(index) == list(range(300))
    assert (np.concatenate([batch.target.numpy() for batch in batches]) == TARGET.to_numpy()[index]).all()
    weight = np.concatenate([batch.weight.numpy() for batch in batches])
    assert (weight == np.where(index % 3, 1.0, 2.0)).all()
    again = np.concatenate([batch.x[:, 0].numpy() for batch in rows.batches(32, seed=1, epoch=0)])
    other = np.concatenate([batch.x[:, 0].numpy() for batch in rows.batches(32, seed=1, epoch=1)])
    assert (again == index).all()
    assert (other != index).any()


def test_training_on_a_stream_is_like_training_on_the_table(paths: list[Path]) -> None:
    options = {"epochs": 30, "lr": 0.02, "batch_size": 50, "schedule": "onecycle"}
    streamed = fine_tune_stream(MODULE, ParquetRows(paths, "label"), **options)
    whole = fine_tune(MODULE, FRAME, TARGET, **options)
    assert streamed.history[-1]["train_loss"] == pytest.approx(whole.history[-1]["train_loss"], rel=0.02)
    np.testing.assert_allclose(streamed.module.predict_proba(FRAME), whole.module.predict_proba(FRAME), atol=0.03)


def test_errors_in_files_are_reported_before_work(paths: list[Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="lacks the columns"):
        StreamedRows(ParquetRows(paths, "nothing"), MODULE)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        StreamedRows(ParquetRows([tmp_path / "none.parquet"], "label"), MODULE)
