"""Triton's habits beside inference, by ``tritonclient`` on both wires: configurations, loading, what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mlsys_open_inference import GrpcConfig, create_oip_app, grpc_address_of
from mlsys_serving.http import BackgroundServer
from mlsys_serving.models import (
    DataType,
    DirectorySource,
    InferRequest,
    InferResponse,
    ModelRepository,
    ModelSpec,
    TensorSpec,
)

pytest.importorskip("tritonclient.grpc")
pytest.importorskip("tritonclient.http")
import tritonclient.grpc as by_grpc
import tritonclient.http as by_http
from tritonclient.utils import InferenceServerException

CONFIG = """
name: "twice"
max_batch_size: 4
dynamic_batching { default_queue_policy { default_timeout_microseconds: 5000000 } }
"""


class Twice:
    """Doubles rows of numbers and texts, and notes its requests."""

    def __init__(self, version: str) -> None:
        row = (-1, -1)
        numbers, texts = TensorSpec("x", DataType.FP32, row), TensorSpec("text", DataType.BYTES, row, optional=True)
        outputs = (TensorSpec("y", DataType.FP32, row), TensorSpec("text2", DataType.BYTES, row))
        self.spec = ModelSpec(name="twice", version=version, inputs=(numbers, texts), outputs=outputs, max_batch_size=8)
        self.requests: list[InferRequest] = []

    async def infer(self, request: InferRequest) -> InferResponse:
        self.requests.append(request)
        x = request.inputs["x"]
        text = request.inputs.get("text", np.full((len(x), 1), b"", np.object_))
        return InferResponse({"y": x * 2, "text2": text + text})

    async def close(self) -> None:
        """Free nothing."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Three versions of a model in a folder with its configuration, and clients of both kinds."""
    root = tmp_path_factory.mktemp("models")
    for version in ("1", "2", "10"):
        (root / "twice" / version).mkdir(parents=True)
        (root / "twice" / version / "model").write_text("")
    (root / "twice" / "config.pbtxt").write_text(CONFIG)
    built: list[Twice] = []

    def build(directory: Path, name: str, version: str) -> Twice:
        built.append(Twice(version))
        return built[-1]

    source = DirectorySource([root], build=build, marker="model")
    repository = ModelRepository(source=source)
    app = create_oip_app(repository, grpc=GrpcConfig(), model_control=True)
    with BackgroundServer(app) as server, contextlib.ExitStack() as stack:
        address, grpc = server.address, grpc_address_of(app)
        clients = {
            "http": stack.enter_context(by_http.InferenceServerClient(f"{address.host}:{address.port}")),
            "grpc": stack.enter_context(by_grpc.InferenceServerClient(f"{grpc.host}:{grpc.port}")),
        }
        modules = {"http": by_http, "grpc": by_grpc}
        yield SimpleNamespace(root=root, built=built, clients=clients, modules=modules, repository=repository)


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_the_configuration_bounds_batches_and_time(served: SimpleNamespace, wire: str) -> None:
    client, module = served.clients[wire], served.modules[wire]
    assert [model.spec.version for model in served.built[:3]] == ["1", "2", "10"]
    assert served.clients["http"].get_model_config("twice")["max_batch_size"] == 4
    assert served.clients["grpc"].get_model_config("twice").config.max_batch_size == 4
    inputs = [module.InferInput("x", [1, 1], "FP32")]
    inputs[0].set_data_from_numpy(np.ones((1, 1), np.float32))
    client.infer("twice", inputs)
    assert served.built[2].requests[-1].deadline_s is not None


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_model_is_loaded_with_a_configuration_for_once(served: SimpleNamespace, wire: str) -> None:
    client = served.clients[wire]
    client.load_model("twice", config=json.dumps({"max_batch_size": 2}))
    assert served.clients["http"].get_model_config("twice")["max_batch_size"] == 2
    for config, message in (
        ({"rate_limiter": {}}, "'rate_limiter' is not supported"),
        ({"instance_group": [{"count": 2}]}, "'instance_group' is not supported"),
        ({"version_policy": {"all": {}}}, "'version_policy' is not supported"),
        ({"max_batch_size": 9}, "larger --max-batch"),
    ):
        with pytest.raises(InferenceServerException, match=message):
            client.load_model("twice", config=json.dumps(config))
    with pytest.raises(InferenceServerException, match="not files"):
        client.load_model("twice", config="{}", files={"file:1/model": b""})
    del served.built[:]
    client.load_model("twice")
    assert served.clients["http"].get_model_config("twice")["max_batch_size"] == 4


def test_what_is_not_served_is_refused_with_what_to_use(served: SimpleNamespace) -> None:
    for client in served.clients.values():
        for call, message in (
            (lambda c: c.register_system_shared_memory("x", "key", 8), "send tensors as binary data"),
            (lambda c: c.register_cuda_shared_memory("x", b"AAAA", 0, 8), "send tensors as binary data"),
            (lambda c: c.unregister_system_shared_memory(), "send tensors as binary data"),
            (lambda c: c.get_trace_settings(), "--otlp-endpoint"),
            (lambda c: c.update_trace_settings(settings={"trace_rate": "2"}), "OTEL_TRACES_SAMPLER"),
            (lambda c: c.get_log_settings(), "--log-level"),
        ):
            with pytest.raises(InferenceServerException, match=message) as error:
                call(client)
            assert error.value.status() in ("501", "StatusCode.UNIMPLEMENTED")


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_tensor_in_shared_memory_is_refused(served: SimpleNamespace, wire: str) -> None:
    inputs = [served.modules[wire].InferInput("x", [1, 1], "FP32")]
    inputs[0].set_shared_memory("nowhere", 4)
    with pytest.raises(InferenceServerException, match="input 'x': this server has no shared memory"):
        served.clients[wire].infer("twice", inputs)


def test_grpc_has_its_own_health_service(served: SimpleNamespace) -> None:
    client = served.clients["grpc"]
    check = client._channel.unary_unary("/grpc.health.v1.Health/Check")
    assert list(check(b"")) == [8, 1]  # HealthCheckResponse: status SERVING
    assert served.clients["http"].is_server_ready()
