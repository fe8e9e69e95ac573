"""Files that the pages' commands name as the reader's own: a pipeline, tables, questions, texts, a recording."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import skops.io
from sklearn.compose import make_column_transformer
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler


def table(seed: int, num_rows: int = 300) -> pd.DataFrame:
    """Return customers, and whether they churned."""
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({"age": random.uniform(18, 80, num_rows), "city": random.choice(["Oslo", "Bern"], num_rows)})
    frame["churned"] = np.where((frame.age > 50) ^ (random.random(num_rows) < 0.1), "go", "stay")
    return frame


def main() -> None:
    """Write them into this folder."""
    rows = table(0)
    columns = make_column_transformer((StandardScaler(), ["age"]), (OneHotEncoder(), ["city"]))
    pipeline = make_pipeline(columns, GradientBoostingClassifier(n_estimators=5, max_depth=2))
    pipeline.fit(rows.drop(columns="churned"), rows.churned)
    skops.io.dump(pipeline, "churn.skops")
    rows.drop(columns="churned").to_parquet("customers.parquet")
    rows.drop(columns="churned").to_csv("customers.csv", index=False)
    for number, name in enumerate(("january", "february", "this-week")):
        table(number + 1).to_parquet(f"{name}.parquet")
    update = "windtunnel update churn.skops this-week.parquet --target churned -o churn"  # a folder that update wrote
    subprocess.run(["mlsys", *update.split()], check=True)
    shutil.copytree("churn", "price")
    Path("questions.txt").write_text("Why is the sky blue?\nName a fruit.\n")
    Path("texts.txt").write_text("The train is late.\nSo am I.\n")
    events = [{"ph": "X", "name": "prefill", "ts": 10 * n, "dur": 7, "pid": 1, "tid": 1} for n in range(3)]
    Path("run.json.gz").write_text(json.dumps({"traceEvents": events}))


if __name__ == "__main__":
    main()
