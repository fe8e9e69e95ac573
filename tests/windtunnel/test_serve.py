"""Pipelines that are served answer as their sources: rows of JSON, the Open Inference Protocol, several at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fastapi.testclient import TestClient
from mlsys_open_inference import create_oip_app
from mlsys_serving.models import ModelRepository
from mlsys_windtunnel.cli.predict import load_model
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.export.artifact import save
from mlsys_windtunnel.serve.model import ServedPipeline
from mlsys_windtunnel.serve.rows import rows_router
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

rng = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "age": rng.normal(size=40),
        "city": pd.Series(rng.choice(np.array(["Oslo", "Zürich", np.nan], object), 40), dtype=object),
        "is new": rng.random(40) < 0.5,
    }
)
LABELS = np.where(FRAME.age > 0, "ja", "nei")


@pytest.fixture(scope="module")
def sources() -> dict[str, Any]:
    text = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore"))
    columns = make_column_transformer((StandardScaler(), ["age"]), (text, ["city"]), (OneHotEncoder(), ["is new"]))
    x = FRAME[["age"]].to_numpy() + np.arange(2)
    return {
        "churn": make_pipeline(columns, LogisticRegression()).fit(FRAME, LABELS),
        "price": Ridge().fit(x, x[:, 0]),
    }


@pytest.fixture
def client(sources: dict[str, Any], tmp_path: Path) -> Iterator[TestClient]:
    for name, source in sources.items():
        save(translate(source), tmp_path / name)
    pipelines = [ServedPipeline(load_model(tmp_path / name), name, max_batch_size=64) for name in sources]
    repository = ModelRepository(pipelines)
    app = create_oip_app(repository)
    app.include_router(rows_router(repository))
    with TestClient(app) as made:
        yield made


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {name: None if cell is not cell and cell != cell else cell for name, cell in row.items()}
        for row in frame.astype(object).where(frame.notna(), None).to_dict("records")
    ]


def test_rows_of_json(client: TestClient, sources: dict[str, Any]):
    answer = client.post("/predict", json={"model": "churn", "rows": records(FRAME)})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["label"] == sources["churn"].predict(FRAME).tolist()
    assert found["classes"] == ["ja", "nei"]
    np.testing.assert_allclose(found["probabilities"], sources["churn"].predict_proba(FRAME), atol=1e-12)
    columns = {name: [row[name] for row in records(FRAME[:3])] for name in FRAME}
    same = client.post("/predict", json={"model": "churn", "columns": columns}).json()
    assert same["label"] == found["label"][:3]
    numbers = client.post("/predict", json={"model": "price", "rows": [[1.0, 2.0], [0.0, 1.0]]}).json()
    np.testing.assert_allclose(numbers["prediction"], sources["price"].predict([[1.0, 2.0], [0.0, 1.0]]), atol=1e-12)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"rows": [{"age": 1.0}]}, "name the model"),
        ({"model": "churn", "rows": [{"age": 1.0}]}, "lacks the columns"),
        ({"model": "churn", "rows": [{"age": "old", "city": "Oslo", "is new": True}]}, "column age holds numbers"),
        ({"model": "churn", "rows": [{"age": 1.0, "city": 5, "is new": True}]}, "column city is text"),
        ({"model": "churn", "rows": [{"age": 1.0, "city": "Oslo", "is new": 1}]}, "truth values"),
        ({"model": "churn", "rows": [{"age": None, "city": "Oslo", "is new": True}]}, "contains NaN"),
        ({"model": "churn", "rows": [{"age": 10**400, "city": "Oslo", "is new": True}]}, "integer beyond float64"),
        ({"model": "price", "rows": [[1.0, -(10**400)]]}, "integer beyond float64"),
        ({"model": "churn", "rows": []}, "at least one row"),
        ({"model": "churn", "rows": [], "columns": {}}, "one of them"),
        ({"model": "churn", "data": [], "rows": []}, "unknown fields"),
        ({"model": "price", "rows": [[1.0]]}, "a list of 2 cells"),
        ({"model": "price", "rows": [[1.0, 2.0]] * 65}, "at most 64"),
        ([], "the body is an object"),
    ],
)
def test_bad_rows_are_refused_with_a_reason(client: TestClient, body: Any, says: str):
    answer = client.post("/predict", json=body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]


def test_the_open_inference_protocol(client: TestClient, sources: dict[str, Any]):
    described = client.get("/v2/models/churn").json()
    kinds = {each["name"]: each["datatype"] for each in described["inputs"]}
    assert kinds == {"age": "FP64", "city": "BYTES", "is new": "BOOL"}
    rows = FRAME[:5]
    cities = ["nan" if city != city else city for city in rows.city.tolist()]
    inputs = [
        {"name": "age", "datatype": "FP64", "shape": [5, 1], "data": rows.age.tolist()},
        {"name": "city", "datatype": "BYTES", "shape": [5, 1], "data": cities},
        {"name": "is new", "datatype": "BOOL", "shape": [5, 1], "data": rows["is new"].tolist()},
    ]
    answer = client.post("/v2/models/churn/infer", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    outputs = {each["name"]: each for each in answer.json()["outputs"]}
    assert outputs["label"]["data"] == sources["churn"].predict(rows).tolist()
    wanted = sources["churn"].predict_proba(rows).ravel()
    np.testing.assert_allclose(outputs["probabilities"]["data"], wanted, atol=1e-12)
    body = {"inputs": [{"name": "X", "datatype": "FP64", "shape": [1, 2], "data": [1.0, 2.0]}]}
    (output,) = client.post("/v2/models/price/infer", json=body).json()["outputs"]
    np.testing.assert_allclose(output["data"], sources["price"].predict([[1.0, 2.0]]), atol=1e-12)
    assert client.get("/v2/health/ready").status_code == 200
    assert 'nv_inference_count{model="churn",version="1"} 5.0' in client.get("/metrics").text


def test_a_row_that_is_refused_fails_its_own_request_alone(client: TestClient, sources: dict[str, Any]):
    good = {"model": "churn", "rows": records(FRAME[:1])}
    bad = {"model": "churn", "rows": [{"age": None, "city": "Oslo", "is new": True}]}
    with ThreadPoolExecutor(8) as threads:
        bodies = [good, bad] * 20
        answers = list(threads.map(lambda body: client.post("/predict", json=body), bodies))
    assert [answer.status_code for answer in answers] == [200, 400] * 20
    assert {answer.json()["label"][0] for answer in answers[::2]} == {sources["churn"].predict(FRAME[:1])[0]}


def test_the_command_serves_until_it_is_told_to_stop(sources: dict[str, Any], tmp_path: Path):
    import httpx

    save(translate(sources["churn"]), tmp_path / "churn")
    command = [
        sys.executable,
        "-m",
        "mlsys_core.cli.main",
        "windtunnel",
        "serve",
        str(tmp_path / "churn"),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "listening on" in line)
            url = line.split("listening on ")[1].strip()
            answer = httpx.post(f"{url}/predict", json={"rows": records(FRAME[:2])}, timeout=60)
            assert answer.json()["label"] == sources["churn"].predict(FRAME[:2]).tolist()
            assert httpx.get(f"{url}/health/ready", timeout=60).status_code == 200
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
