"""Write artifacts of every format with this version, for later versions to load: ``python -m tests.golden.make``.

Run once for a release, before its tag; the folder of a tagged release is never written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent


def rows() -> Any:
    """Return the rows that all pipelines answer: numbers with a hole, and a column of words."""
    import pandas as pd

    generator = np.random.default_rng(7)
    numbers = generator.normal(size=(24, 3))
    numbers[5, 1] = np.nan
    frame = pd.DataFrame(numbers, columns=["a", "b", "c"])
    frame["word"] = generator.choice(["red", "green", "blue"], 24)
    return frame


def pipelines() -> dict[str, Any]:
    """Return fitted pipelines that between them have encoders, scalers, trees, linear models and boosters."""
    from lightgbm import LGBMClassifier
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame = rows()
    target = (frame["a"] + frame["c"] > 0).astype(int)
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    columns = make_column_transformer((numbers, ["a", "b", "c"]), (OneHotEncoder(handle_unknown="ignore"), ["word"]))
    booster = LGBMClassifier(n_estimators=4, num_leaves=4, min_child_samples=2, verbose=-1)
    forest = RandomForestRegressor(n_estimators=3, max_depth=3, random_state=0)
    return {
        "logistic": make_pipeline(columns, LogisticRegression()).fit(frame, target),
        "booster": make_pipeline(columns, booster).fit(frame, target),
        "forest": make_pipeline(columns, forest).fit(frame, frame["a"]),
    }


def answers_of(model: Any) -> list[Any]:
    """Return what a loaded pipeline answers to :func:`rows`."""
    method = "predict_proba" if hasattr(model, "classes_") and len(model.classes_) else "predict"
    return np.asarray(getattr(model, method)(rows()), dtype=np.float64).tolist()


def hidden_of(model: Any) -> list[Any]:
    """Return what a loaded LSTM answers to five words."""
    from mlsys_batchmaker.engine import Engine, EngineConfig

    with Engine(model, EngineConfig()) as engine:
        outputs = engine.submit({"words": np.arange(5)}).result().outputs
    return np.asarray(outputs["hidden"], dtype=np.float64).tolist()


def make(folder: Path) -> None:
    """Write artifacts and the answers that they gave into ``folder``, which must be new."""
    from mlsys_batchmaker.models.sequence import lstm_model
    from mlsys_batchmaker.models.store import save_model
    from mlsys_windtunnel import translate
    from mlsys_windtunnel.export.artifact import save
    from mlsys_windtunnel.export.onnx import export_onnx
    from mlsys_windtunnel.export.pt2 import export_pt2

    folder.mkdir(parents=True)
    expected = {}
    for name, pipeline in pipelines().items():
        module = translate(pipeline)
        save(module, folder / "windtunnel" / name)
        methods = ["predict"] if name == "forest" else ["predict", "predict_proba"]
        export_pt2(module, folder / "windtunnel" / f"{name}.pt2", methods=methods)
        export_onnx(module, folder / "windtunnel" / f"{name}.onnx", methods=methods)
        expected[name] = answers_of(module)
    (folder / "windtunnel" / "answers.json").write_text(json.dumps(expected))
    torch.manual_seed(0)
    model = lstm_model(num_words=9, hidden_size=8, batch_sizes=(1, 2))
    save_model(model, folder / "batchmaker")
    (folder / "batchmaker" / "answers.json").write_text(json.dumps(hidden_of(model)))


if __name__ == "__main__":
    import mlsys_core

    make(HERE / mlsys_core.__version__)
