"""Triton's habits beside inference, by ``tritonclient`` over HTTP and gRPC: shared memory, configurations, traces."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from tritonclient.utils import InferenceServerException, shared_memory

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
    app = create_oip_app(repository, grpc=GrpcConfig(), model_control=True, shared_memory=True)
    with BackgroundServer(app) as server, contextlib.ExitStack() as stack:
        address, grpc = server.address, grpc_address_of(app)
        clients = {
            "http": stack.enter_context(by_http.InferenceServerClient(f"{address.host}:{address.port}")),
            "grpc": stack.enter_context(by_grpc.InferenceServerClient(f"{grpc.host}:{grpc.port}")),
        }
        modules = {"http": by_http, "grpc": by_grpc}
        yield SimpleNamespace(root=root, built=built, clients=clients, modules=modules, repository=repository)


def texts(values: list[bytes]) -> Any:
    return np.array(values, np.object_).reshape(-1, 1)


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_tensors_of_numbers_and_texts_lie_in_shared_memory(served: SimpleNamespace, wire: str) -> None:
    client, module = served.clients[wire], served.modules[wire]
    x, text = np.arange(6, dtype=np.float32).reshape(2, 3), texts([b"ab", b"\0c"])
    from tritonclient.utils import serialize_byte_tensor

    raw = serialize_byte_tensor(text)
    key = f"mlsys-test-{os.getpid()}-{wire}"
    region = shared_memory.create_shared_memory_region("all", key, 4096)
    try:
        shared_memory.set_shared_memory_region(region, [x])
        shared_memory.set_shared_memory_region(region, [raw], offset=1024)
        client.register_system_shared_memory("all", key, 4096)
        with pytest.raises(InferenceServerException, match="registered already"):
            client.register_system_shared_memory("all", key, 4096)
        inputs = [module.InferInput("x", [2, 3], "FP32"), module.InferInput("text", [2, 1], "BYTES")]
        inputs[0].set_shared_memory("all", x.nbytes)
        inputs[1].set_shared_memory("all", len(raw.item()), offset=1024)
        outputs = [module.InferRequestedOutput("y"), module.InferRequestedOutput("text2")]
        outputs[0].set_shared_memory("all", x.nbytes, offset=2048)
        result = client.infer("twice", inputs, outputs=outputs)
        found = shared_memory.get_contents_as_numpy(region, np.float32, [2, 3], 2048)
        np.testing.assert_array_equal(found, 2 * x)
        assert result.as_numpy("text2").tolist() == [[b"abab"], [b"\0c\0c"]]
        outputs[0].set_shared_memory("all", 8, offset=2048)
        with pytest.raises(InferenceServerException, match="24 bytes, and its shared memory room for 8"):
            client.infer("twice", inputs, outputs=outputs)
        inputs[0].set_shared_memory("all", x.nbytes, offset=4090)
        with pytest.raises(InferenceServerException, match="has 4096"):
            client.infer("twice", inputs)
        status = client.get_system_shared_memory_status()
        names = [each["name"] for each in status] if wire == "http" else list(status.regions)
        assert names == ["all"]
        client.unregister_system_shared_memory("all")
        inputs[0].set_shared_memory("all", x.nbytes)
        with pytest.raises(InferenceServerException, match="register it first"):
            client.infer("twice", inputs)
    finally:
        client.unregister_system_shared_memory()
        shared_memory.destroy_shared_memory_region(region)


@pytest.mark.parametrize("key", ["../../etc/passwd", "no-such-region", ".."])
def test_a_key_that_is_no_shared_memory_is_refused(served: SimpleNamespace, key: str) -> None:
    for client in served.clients.values():
        with pytest.raises(InferenceServerException, match=r"no key of shared memory|cannot be opened"):
            client.register_system_shared_memory("other", key, 8)


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


def test_traces_that_are_not_exported_are_off_and_stay_so(served: SimpleNamespace) -> None:
    http, grpc = served.clients["http"], served.clients["grpc"]
    assert http.get_trace_settings()["trace_level"] == ["OFF"]
    assert list(grpc.get_trace_settings().settings["trace_level"].value) == ["OFF"]
    with pytest.raises(InferenceServerException, match="--otlp-endpoint"):
        http.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
    with pytest.raises(InferenceServerException, match="--otlp-endpoint"):
        grpc.update_trace_settings(settings={"trace_rate": "2"})
    for client in (http, grpc):
        assert client.get_trace_settings("twice") == client.get_trace_settings()
        client.update_trace_settings(settings={"trace_level": ["OFF"]})  # as they are
        with pytest.raises(InferenceServerException, match="one model"):
            client.update_trace_settings("twice", settings={"trace_level": ["OFF"]})
        with pytest.raises(InferenceServerException, match="no model 'nope'"):
            client.get_trace_settings("nope")


def test_a_program_may_forget_what_it_has_not_got(served: SimpleNamespace) -> None:
    for wire, client in served.clients.items():
        assert not (
            client.get_cuda_shared_memory_status() if wire == "http" else client.get_cuda_shared_memory_status().regions
        )
        client.unregister_cuda_shared_memory()
        client.unregister_system_shared_memory()
        with pytest.raises(InferenceServerException, match="shared memory of GPUs"):
            client.register_cuda_shared_memory("x", b"AAAA", 0, 8)
        inputs = [served.modules[wire].InferInput("x", [1, 1], "FP32")]
        inputs[0].set_shared_memory("nowhere", 4)
        with pytest.raises(InferenceServerException) as error:
            client.infer("twice", inputs)
        assert error.value.status() in ("404", "StatusCode.NOT_FOUND")


def test_grpc_has_its_own_health_service(served: SimpleNamespace) -> None:
    client = served.clients["grpc"]
    check = client._channel.unary_unary("/grpc.health.v1.Health/Check")
    assert list(check(b"")) == [8, 1]  # HealthCheckResponse: status SERVING
    assert served.clients["http"].is_server_ready()
