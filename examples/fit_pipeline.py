"""Fit a pipeline on the adult census table and save it with skops; then: mlsys windtunnel inspect pipeline.skops."""

import sys
from pathlib import Path

import pandas as pd
import skops.io
from mlsys_core.config import settings
from mlsys_core.models import resolve_model
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler


def main(path: Path) -> None:
    adult = pd.read_parquet(resolve_model("adult", settings().cache_dir)).head(5000)
    target = adult.pop("income")
    numbers = adult.select_dtypes("number").columns.tolist()
    words = [name for name in adult.columns if name not in numbers]
    columns = make_column_transformer((StandardScaler(), numbers), (OneHotEncoder(handle_unknown="ignore"), words))
    pipeline = make_pipeline(columns, LogisticRegression(max_iter=1000)).fit(adult, target)
    skops.io.dump(pipeline, path)
    print(f"{path}: accuracy on its own rows {pipeline.score(adult, target):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "pipeline.skops"))
