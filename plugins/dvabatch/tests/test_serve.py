"""Served over the Open Inference Protocol: real answers, isolation, metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from mlsys_dvabatch.scheduling.policies.load import LoadOperatorPolicy
from mlsys_dvabatch.serve.models import ServedModel
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_open_inference import create_oip_app
from mlsys_serving.models import ModelRepository
from torch import Tensor, nn

from tests.infer import ask_without_operators, tensor


class Small(nn.Module):
    """Two layers, and an input that one request can spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) / x[:, :1]


def two_stages(module: Small) -> ServedModel:
    program = program_of(module.eval(), (torch.ones(1, 4),))
    return ServedModel(
        Loaded("small", SlicedModel(program, program.allowed_cuts[1:2])),
        parse_stages("1+1,1+1"),
        LoadOperatorPolicy(),
        num_threads=1,
    )


@pytest.fixture
def small() -> Iterator[tuple[TestClient, Small]]:
    torch.manual_seed(0)
    module = Small().eval()
    with TestClient(create_oip_app(ModelRepository([two_stages(module)]))) as client:
        yield client, module


def test_a_sliced_model_answers_as_the_whole(small: tuple[TestClient, Small]):
    client, module = small
    rows = torch.rand(5, 4) + 1
    answer = client.post("/v2/models/small/infer", json={"inputs": [tensor("x", "FP32", rows.tolist())]})
    assert answer.status_code == 200, answer.text
    with torch.inference_mode():
        expected = module(rows).flatten().tolist()
    assert answer.json()["outputs"][0]["data"] == pytest.approx(expected, abs=1e-5)


def test_an_answer_that_is_not_finite_is_sent_as_bytes_and_refused_as_json(small: tuple[TestClient, Small]):
    client, module = small
    rows = [[0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    asked = {"inputs": [tensor("x", "FP32", rows)]}
    answer = client.post("/v2/models/small/infer", json=asked)
    assert answer.status_code == 400
    assert "holds NaN or infinity, which JSON cannot: ask for it with 'binary_data': true" in answer.text
    answer = client.post("/v2/models/small/infer", json=asked | {"parameters": {"binary_data_output": True}})
    assert answer.status_code == 200
    got = np.frombuffer(answer.content[int(answer.headers["Inference-Header-Content-Length"]) :], np.float32)
    with torch.inference_mode():
        expected = module(torch.tensor(rows)).flatten().numpy()
    assert not np.isfinite(got).all()
    assert np.allclose(got, expected, equal_nan=True, atol=1e-5)
    good = client.post("/v2/models/small/infer", json={"inputs": [tensor("x", "FP32", [[1.0, 1.0, 1.0, 1.0]])]})
    assert good.status_code == 200


class Words(nn.Module):
    """A table of ten words, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).sum(1))


class Pixels(nn.Module):
    """Numbers of any kind made fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x.float() / 128), x + x


def one_stage(name: str, module: nn.Module, example: Tensor) -> ServedModel:
    model = SlicedModel(program_of(module.eval(), (example,)), [])
    return ServedModel(Loaded(name, model), parse_stages("1+1"), LoadOperatorPolicy(), num_threads=1)


def test_numbers_outside_a_table_are_refused_with_the_reason():
    served = one_stage("words", Words(), torch.zeros(1, 3, dtype=torch.int64))
    with TestClient(create_oip_app(ModelRepository([served]))) as client:
        for row, status in (([1, 2, 9], 200), ([1, 2, 10], 400), ([1, -1, 2], 400)):
            answer = client.post("/v2/models/words/infer", json={"inputs": [tensor("x", "INT64", [row])]})
            assert answer.status_code == status, answer.text
            assert status == 200 or "the model does not take these values: index out of range" in answer.text


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [(torch.uint8, "UINT8"), (torch.int8, "INT8"), (torch.int16, "INT16"), (torch.float16, "FP16")],
)
def test_images_and_small_numbers_are_served_as_they_are(dtype: torch.dtype, datatype: str):
    torch.manual_seed(0)
    module = Pixels()
    served = one_stage("pixels", module, torch.zeros(1, 3, dtype=dtype))
    with TestClient(create_oip_app(ModelRepository([served]))) as client:
        rows = torch.tensor([[1, 2, 100], [0, 127, 64]], dtype=dtype)
        raw = rows.numpy().tobytes()
        head = {
            "inputs": [
                {
                    "name": "x",
                    "datatype": datatype,
                    "shape": [2, 3],
                    "parameters": {"binary_data_size": len(raw)},
                }
            ],
            "outputs": [{"name": f"output_{number}", "parameters": {"binary_data": True}} for number in (0, 1)],
        }
        body = json.dumps(head).encode()
        size = "inference-header-content-length"
        answer = client.post("/v2/models/pixels/infer", content=body + raw, headers={size: str(len(body))})
        assert answer.status_code == 200, answer.text
        scores, doubled = module(rows)
        data = answer.content[int(answer.headers[size]) :]
        np.testing.assert_allclose(np.frombuffer(data[:16], np.float32), scores.detach().numpy().ravel(), atol=1e-6)
        assert data[16:] == doubled.numpy().tobytes()  # whole numbers wrap, as in torch


def test_the_event_loop_runs_no_operator_of_torch():
    """Each lets go of Python's lock, and the loop waits until the worker threads give it back."""
    loaded = Loaded("sliced", SlicedModel(program_of(Small().eval(), (torch.ones(1, 4),)), []))
    served = ServedModel(loaded, parse_stages("1+1"), LoadOperatorPolicy(), num_threads=1)
    ask_without_operators(served, {"x": np.ones((3, 4), np.float32)})


class Board:
    """A board that lists what it is told."""

    unit = "task"

    def __init__(self) -> None:
        self.labels: set[str] = set()
        self.reasons: dict[str, str] = {}

    def opened(self, request_id: str, *, at_s: float | None = None) -> None:
        self.reasons[request_id] = ""

    def row(self, request_id: str) -> SimpleNamespace:
        return SimpleNamespace(number=1)

    def add(self, start_s: float, end_s: float, squares: Any, *, label: str, **more: Any) -> None:
        self.labels.add(label)

    def closed(self, request_id: str, reason: str, *, at_s: float | None = None) -> None:
        self.reasons[request_id] = self.reasons[request_id] or reason  # who has left is not told of again


def test_tasks_of_stages_can_be_watched():
    served = two_stages(Small())
    app = create_oip_app(ModelRepository([served]), system="dvabatch", unit="task")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [1.0, 2.0, 3.0, 4.0] * 2}]}
    with TestClient(app) as client:
        assert client.post("/v2/models/small/infer", json=body).status_code == 200
        board = Board()
        served.score_source.begin(board)
        for event in served.score_source.log.begin(threading.RLock()):  # what was kept while nobody looked
            event.call(*event.args)
    assert '<th scope="row">policy</th><td>LoadOperatorPolicy</td>' in served.engine._repr_html_()
    assert list(board.reasons.values()) == ["done", "done"]
    assert board.labels
    assert board.labels <= {"stage 1", "stage 2", "stage 1-2"}
