"""Served over the Open Inference Protocol: real answers, isolation, metrics."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from mlsys_dvabatch.scheduling.policies.base import Policy
from mlsys_dvabatch.scheduling.policies.input import InputPolicy, PackedPolicy
from mlsys_dvabatch.scheduling.policies.load import LoadOperatorPolicy
from mlsys_dvabatch.serve.models import ServedModel, StageMetrics
from mlsys_dvabatch.stages.models.bert import BertStages
from mlsys_dvabatch.stages.models.config import BertConfig
from mlsys_dvabatch.stages.simulated import parse_stages
from mlsys_dvabatch.stages.slicing.program import program_of
from mlsys_dvabatch.stages.slicing.sliced import SlicedModel
from mlsys_dvabatch.stages.zoo import Loaded
from mlsys_serving.oip import InferRequest, ModelRepository, create_oip_app
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

TINY = BertConfig(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, vocab_size=100, max_length=32)


class Small(nn.Module):
    """Two layers, and an input that one request can spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) / x[:, :1]


def encoder(policy: Policy, *, is_packed: bool) -> tuple[ServedModel, BertStages]:
    torch.manual_seed(0)
    model = BertStages(TINY, 2).eval()
    served = ServedModel(
        Loaded("tiny", model.with_form(is_packed=is_packed)),
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


def tensor(name: str, datatype: str, rows: list[list[float]]) -> dict[str, object]:
    return {
        "name": name,
        "datatype": datatype,
        "shape": [len(rows), len(rows[0])],
        "data": [value for row in rows for value in row],
    }


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


@pytest.fixture
def small() -> Iterator[tuple[TestClient, Small]]:
    torch.manual_seed(0)
    module = Small().eval()
    program = program_of(module, (torch.ones(1, 4),))
    served = ServedModel(
        Loaded("small", SlicedModel(program, program.allowed_cuts[1:2])),
        parse_stages("1+1,1+1"),
        LoadOperatorPolicy(),
        num_threads=1,
    )
    with TestClient(create_oip_app(ModelRepository([served]))) as client:
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


class NoOperators(TorchDispatchMode):
    """None of torch's operators may run in this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise AssertionError(f"{func} runs in the event loop's thread")


@pytest.mark.parametrize("kind", ["encoder", "packed encoder", "sliced"])
def test_the_event_loop_runs_no_operator_of_torch(kind: str):
    """Each lets go of Python's lock, and the loop waits until the worker threads give it back."""
    if kind == "sliced":
        loaded = Loaded("sliced", SlicedModel(program_of(Small().eval(), (torch.ones(1, 4),)), []))
        served = ServedModel(loaded, parse_stages("1+1"), LoadOperatorPolicy(), num_threads=1)
        inputs = {"x": np.ones((3, 4), np.float32)}
    else:
        is_packed = kind == "packed encoder"
        served, _ = encoder(PackedPolicy() if is_packed else InputPolicy(), is_packed=is_packed)
        inputs = {"input_ids": np.full((3, 5), 7), "attention_mask": np.tri(3, 5, 2, np.int64)}

    async def ask() -> None:
        request = InferRequest(
            key="1", model_name=served.spec.name, model_version="1", inputs=inputs, outputs=(), num_rows=3
        )
        with NoOperators():
            response = await served.infer(request)
            await served.close()
        assert {array.shape[0] for array in response.outputs.values()} == {3}

    asyncio.run(ask())


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
    served, _ = encoder(InputPolicy(), is_packed=False)
    app = create_oip_app(ModelRepository([served]), system="dvabatch", unit="task")
    body = {
        "inputs": [{"name": served.spec.inputs[0].name, "datatype": "INT64", "shape": [2, 3], "data": [1, 2, 3] * 2}]
    }
    with TestClient(app) as client:
        assert client.post("/v2/models/tiny/infer", json=body).status_code == 200
        board = Board()
        served.score_source.begin(board)
        for event in served.score_source.log.begin(threading.RLock()):  # what was kept while nobody looked
            event.call(*event.args)
    assert '<th scope="row">policy</th><td>InputPolicy</td>' in served.engine._repr_html_()
    assert list(board.reasons.values()) == ["done", "done"]
    assert board.labels
    assert board.labels <= {"stage 1", "stage 2", "stage 1-2"}
