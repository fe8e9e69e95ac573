"""Encoders over the Open Inference Protocol: real answers, refusals, the score, and services of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from mlsys_dvabatch import Service
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.input import InputPolicy, PackedPolicy
from mlsys_dvabatch.serve.models import ServedModel, StageMetrics
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_encoders.models.bert import BertStages
from mlsys_encoders.models.config import BertConfig
from mlsys_encoders.serve.wire import EncoderWire
from mlsys_open_inference import create_oip_app
from mlsys_serving.models import ModelRepository
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from tests.infer import ask_without_operators, tensor

from .texts import write_folder

TINY = BertConfig(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, vocab_size=100, max_length=32)


def encoder(policy: Policy, *, is_packed: bool) -> tuple[ServedModel, BertStages]:
    torch.manual_seed(0)
    model = BertStages(TINY, 2).eval()
    served = ServedModel(
        Loaded("tiny", model.with_form(is_packed=is_packed), EncoderWire(TINY)),
        parse_stages("1+1,1+1"),
        policy,
        max_batch_size=8,
        num_threads=1,
    )
    return served, model


@pytest.fixture(params=["input", "packed"])
def tiny(request: pytest.FixtureRequest) -> Iterator[tuple[TestClient, BertStages]]:
    is_packed = request.param == "packed"
    served, model = encoder(PackedPolicy() if is_packed else InputPolicy(), is_packed=is_packed)
    registry = CollectorRegistry()
    registry.register(StageMetrics([served]))
    with TestClient(create_oip_app(ModelRepository([served]), registry=registry)) as client:
        yield client, model


def embed(model: BertStages, ids: list[int]) -> NDArray[np.float32]:
    with torch.inference_mode():
        from mlsys_core.loop import ServeRequest

        values = model.collate([ServeRequest("x", np.array(ids))], len(ids))
        for stage in range(model.num_stages):
            values = model.run(stage, values)
        return model.results(values)[0]


def test_rows_of_several_lengths(tiny: tuple[TestClient, BertStages]):
    client, model = tiny
    ids = [[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]]
    mask = [[int(token > 0) for token in row] for row in ids]
    body = {"inputs": [tensor("input_ids", "INT64", ids), tensor("attention_mask", "INT64", mask)]}
    answer = client.post("/v2/models/tiny/infer", json=body)
    assert answer.status_code == 200, answer.text
    output = answer.json()["outputs"][0]
    got = np.array(output["data"], np.float32).reshape(output["shape"])
    expected = np.stack([embed(model, [token for token in row if token]) for row in ids])
    np.testing.assert_allclose(got, expected, atol=1e-5)
    metrics = client.get("/metrics").text
    assert 'mlsys_dvabatch_stage_rows_total{model="tiny",stage="1"} 3.0' in metrics
    assert 'mlsys_dvabatch_operations_total{model="tiny",operation="new"}' in metrics


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([tensor("input_ids", "INT64", [[1, 100]])], "vocabulary has 0 to 99"),
        ([tensor("input_ids", "INT64", [[1] * 33])], "takes 1 to 32"),
        ([tensor("input_ids", "INT64", [[1, 2]]), tensor("attention_mask", "INT64", [[0, 1]])], "pad on the right"),
        ([tensor("input_ids", "INT64", [[1, 2]]), tensor("attention_mask", "INT64", [[0, 0]])], "takes 1 to 32"),
        ([tensor("input_ids", "FP32", [[1.0, 2.0]])], "INT64"),
        ([{"name": "input_ids", "datatype": "INT64", "shape": [2], "data": [1, 2]}], "shape"),
        ([tensor("input_ids", "INT64", [[1]] * 9)], "8"),
    ],
)
def test_bad_requests_are_refused(tiny: tuple[TestClient, BertStages], inputs: list[object], says: str):
    answer = tiny[0].post("/v2/models/tiny/infer", json={"inputs": inputs})
    assert answer.status_code == 400
    assert says in answer.text


def test_many_bytes_of_rows_are_not_looked_at_on_the_event_loops_thread(monkeypatch: pytest.MonkeyPatch):
    threads = []
    check = BertStages.check

    def watched(self: BertStages, payload: Any) -> int:
        threads.append(threading.current_thread().name)
        return check(self, payload)

    monkeypatch.setattr(BertStages, "check", watched)
    served, _ = encoder(InputPolicy(), is_packed=False)
    with TestClient(create_oip_app(ModelRepository([served]))) as client:
        for length in (4, 1 << 20):
            raw = np.ones((1, length), np.int64).tobytes()
            node = {"name": "input_ids", "datatype": "INT64", "shape": [1, length]}
            header = json.dumps({"inputs": [node | {"parameters": {"binary_data_size": len(raw)}}]}).encode()
            headers = {"Inference-Header-Content-Length": str(len(header))}
            answer = client.post("/v2/models/tiny/infer", content=header + raw, headers=headers)
            assert answer.status_code == (200 if length == 4 else 400)
    assert not threads[0].startswith("dvabatch")
    assert threads[1] == "dvabatch-large_0"


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_event_loop_runs_no_operator_of_torch(is_packed: bool):
    """Each lets go of Python's lock, and the loop waits until the worker threads give it back."""
    served, _ = encoder(PackedPolicy() if is_packed else InputPolicy(), is_packed=is_packed)
    mask = np.tri(3, 5, 2, np.int64)
    ask_without_operators(served, {"input_ids": np.full((3, 5), 7), "attention_mask": mask})


def test_encoders_take_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLSYS_CACHE_DIR", str(tmp_path / "cache"))
    write_folder(tmp_path / "small")
    service = Service(
        tmp_path / "small", preprocess=lambda body: body["text"], postprocess=lambda vector: {"size": len(vector)}
    )
    assert service({"text": "the cat sat"}) == {"size": 24}
