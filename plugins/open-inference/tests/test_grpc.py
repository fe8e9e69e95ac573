"""The gRPC front by messages of its own schema, over a real channel; clients' own messages: tests/conformance/oip."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from mlsys_core.errors import ServingError
from mlsys_open_inference import GrpcConfig, grpc_address_of
from mlsys_open_inference.grpc.schema import SERVICE, messages
from mlsys_serving.http import BackgroundServer, runtime_of

m = messages()


class Client:
    """Calls methods by name."""

    def __init__(self, app: FastAPI, **metadata: str) -> None:
        address = grpc_address_of(app)
        self.channel = grpc.insecure_channel(f"{address.host}:{address.port}")
        self.metadata = tuple(metadata.items())

    def __call__(self, name: str, request: Any = None, **options: Any) -> Any:
        request = getattr(m, f"{name}Request")() if request is None else request
        call = self.channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=getattr(m, f"{name}Response").FromString,
        )
        return call(request, metadata=self.metadata, timeout=options.pop("timeout", 30), **options)

    def stream(self, requests: list[Any]) -> Any:
        call = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=m.ModelStreamInferResponse.FromString,
        )
        return call(iter(requests), metadata=self.metadata)


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[[FastAPI], Client]]:
    servers: list[BackgroundServer] = []

    def start(app: FastAPI, **metadata: str) -> Client:
        servers.append(BackgroundServer(app).start())
        return Client(app, **metadata)

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def app(make_app: Any) -> FastAPI:
    built: FastAPI = make_app(app={"grpc": GrpcConfig()})
    return built


@pytest.fixture
def call(serve: Any, app: FastAPI) -> Client:
    client: Client = serve(app)
    return client


def add_request(data: list[float], **fields: Any) -> Any:
    request = m.ModelInferRequest(model_name="add", **fields)
    request.inputs.add(name="a", datatype="FP32", shape=[1, len(data)])
    request.raw_input_contents.append(np.float32(data).tobytes())
    return request


def text_request(text: bytes, **parameters: Any) -> Any:
    request = m.ModelInferRequest(model_name="repeat", id=text.decode())
    request.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
    for name, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], field, value)
    return request


MALFORMED = (b"\xff" * 9, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\xc3\x28")  # a tag, a length, text that is no UTF-8


@pytest.mark.parametrize("content", MALFORMED)
def test_bytes_that_are_no_message_are_refused_and_counted(call: Client, app: FastAPI, content: bytes) -> None:
    def counted(method: str) -> float:
        registry = runtime_of(app).metrics.registry
        labels = {"method": method, "code": "INVALID_ARGUMENT"}
        return registry.get_sample_value("mlsys_grpc_requests_total", labels) or 0.0

    unary = call.channel.unary_unary(f"/{SERVICE}/ModelInfer")
    code, details = refusal(lambda: unary(content, timeout=600))
    assert (code, counted("ModelInfer")) == ("INVALID_ARGUMENT", 1)
    assert f"{len(content)} bytes are no ModelInferRequest" in details
    stream = call.channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
    good = add_request([1.0]).SerializeToString()
    answers = stream(iter([good, content, good]), timeout=600)
    assert m.ModelStreamInferResponse.FromString(next(answers)).infer_response.model_name == "add"
    assert refusal(lambda: next(answers))[0] == "INVALID_ARGUMENT"
    assert counted("ModelStreamInfer") == 1


def test_raw_and_typed_contents(call: Client) -> None:
    raw = call("ModelInfer", add_request([1, 2], id="7"))
    assert (raw.model_name, raw.model_version, raw.id) == ("add", "1", "7")
    assert [(output.name, output.datatype, list(output.shape)) for output in raw.outputs] == [("sum", "FP32", [1, 2])]
    assert np.frombuffer(raw.raw_output_contents[0], np.float32).tolist() == [1, 2]
    typed = m.ModelInferRequest(model_name="add", model_version="1")
    for name in "ab":
        typed.inputs.add(name=name, datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    assert np.frombuffer(call("ModelInfer", typed).raw_output_contents[0], np.float32).tolist() == [2, 4]


def test_the_servers_own_description(call: Client) -> None:
    assert call("ServerLive").live
    assert call("ServerReady").ready
    assert call("ModelReady", m.ModelReadyRequest(name="add")).ready
    assert not call("ModelReady", m.ModelReadyRequest(name="nope")).ready
    assert "statistics" in call("ServerMetadata").extensions
    metadata = call("ModelMetadata", m.ModelMetadataRequest(name="add"))
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs] == [
        ("a", "FP32", [-1, -1]),
        ("b", "FP32", [-1, -1]),
    ]
    config = call("ModelConfig", m.ModelConfigRequest(name="repeat")).config
    assert config.model_transaction_policy.decoupled
    call("ModelInfer", add_request([1]))
    [stats] = call("ModelStatistics", m.ModelStatisticsRequest(name="add")).model_stats
    assert (stats.inference_count, stats.inference_stats.success.count) == (1, 1)
    assert len(call("ModelStatistics").model_stats) == 5
    index = call("RepositoryIndex", m.RepositoryIndexRequest(ready=True)).models
    assert next((model.name, model.state) for model in index) == ("add", "READY")


def test_a_model_is_unloaded_and_not_loaded_without_a_source(call: Client) -> None:
    call("RepositoryModelUnload", m.RepositoryModelUnloadRequest(model_name="echo"))
    assert not call("ModelReady", m.ModelReadyRequest(name="echo")).ready
    load = m.RepositoryModelLoadRequest(model_name="echo")
    assert refusal(lambda: call("RepositoryModelLoad", load))[0] == "INVALID_ARGUMENT"
    load.parameters["file:1/model"].bytes_param = b""
    assert refusal(lambda: call("RepositoryModelLoad", load))[0] == "UNIMPLEMENTED"


def bad(change: Callable[[Any], Any]) -> Any:
    request = add_request([1, 2])
    change(request)
    return request


BAD: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "model": (lambda r: setattr(r, "model_name", "nope"), "NOT_FOUND", "there is no model 'nope'"),
    "version": (lambda r: setattr(r, "model_version", "9"), "NOT_FOUND", "there is no version '9'"),
    "decoupled": (lambda r: setattr(r, "model_name", "repeat"), "UNIMPLEMENTED", "ModelStreamInfer"),
    "datatype": (lambda r: setattr(r.inputs[0], "datatype", "INT8"), "INVALID_ARGUMENT", "is INT8, but"),
    "name": (lambda r: setattr(r.inputs[0], "name", "z"), "INVALID_ARGUMENT", "has no input 'z'"),
    "shape": (lambda r: r.inputs[0].shape.append(1), "INVALID_ARGUMENT", "has shape [1, 2, 1], but"),
    "raw count": (lambda r: r.raw_input_contents.append(b""), "INVALID_ARGUMENT", "has 2 elements for 1 inputs"),
    "nan": (
        lambda r: r.raw_input_contents.__setitem__(0, np.float32([np.nan, 0]).tobytes()),
        "INVALID_ARGUMENT",
        "NaN or infinity",
    ),
    "output": (lambda r: r.outputs.add(name="z"), "INVALID_ARGUMENT", "has no output 'z'"),
    "parameter": (lambda r: r.parameters["x"].SetInParent(), "INVALID_ARGUMENT", "parameter 'x' has no value"),
    "shared memory": (
        lambda r: setattr(r.inputs[0].parameters["shared_memory_region"], "string_param", "r"),
        "UNIMPLEMENTED",
        "shared memory",
    ),
}


def test_bad_requests_are_refused_one_by_one(call: Client) -> None:
    for name, (change, code, message) in BAD.items():
        got, details = refusal(lambda change=change: call("ModelInfer", bad(change)))  # type: ignore[misc]
        assert got == code, name
        assert message in details, name
        assert call("ModelInfer", add_request([1])).outputs
    broken = m.ModelInferRequest(model_name="broken")
    broken.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(1)
    broken.parameters["how"].string_param = "raises"
    assert refusal(lambda: call("ModelInfer", broken)) == (
        "INTERNAL",
        "the server failed on this request; its operator finds the reason in the log under the request id",
    )


def test_classifications(call: Client) -> None:
    request = add_request([1, 5, 3])
    request.outputs.add(name="sum").parameters["classification"].int64_param = 1
    response = call("ModelInfer", request)
    assert response.outputs[0].datatype == "BYTES"
    assert response.raw_output_contents[0].endswith(b"5.000000:1:one")


def test_a_stream_answers_each_request_by_itself(call: Client) -> None:
    requests = [
        text_request(b"x yy"),
        add_request([1], id="first"),
        add_request([2], id="second"),
        text_request(b"bad", fail_after=0),
        m.ModelInferRequest(model_name="nope", id="none"),
    ]
    requests[1].parameters["delay_s"].double_param = 0.05
    by_id: dict[str, list[Any]] = {}
    order = []
    for response in call.stream(requests):
        by_id.setdefault(response.infer_response.id, []).append(response)
        order.append(response.infer_response.id)
    words = [response.infer_response.raw_output_contents[0][4:] for response in by_id["x yy"]]
    assert words == [b"x", b"yy"]
    assert order.index("first") < order.index("second") < order.index("none")  # unary answers keep their order
    assert [response.error_message for response in by_id["none"]] == ["there is no model 'nope' here"]
    assert "the server failed" in by_id["bad"][0].error_message
    assert len(order) == 6


def test_a_stream_marks_each_response_and_gives_an_empty_last_one_if_asked_to(call: Client) -> None:
    flag = "triton_enable_empty_final_response"
    unary = add_request([1], id="unary")
    unary.parameters[flag].bool_param = True
    responses = list(call.stream([text_request(b"x", **{flag: True}), text_request(b"y"), unary]))

    def finals(request_id: str) -> list[bool | None]:
        return [
            response.infer_response.parameters["triton_final_response"].bool_param
            if "triton_final_response" in response.infer_response.parameters
            else None
            for response in responses
            if response.infer_response.id == request_id
        ]

    assert finals("x") == [False, True]
    assert finals("y") == [False]
    assert finals("unary") == [True]


def test_a_stream_of_many_requests_is_bounded_and_complete(call: Client) -> None:
    requests = [text_request(b"w " * 3) for _ in range(300)]
    assert sum(1 for _ in call.stream(requests)) == 900


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def test_cancelled_calls_and_deadlines_cancel_the_model(serve: Any, make_app: Any, reference: ModuleType) -> None:
    add, repeat = reference.Add(), reference.Repeat()
    app = make_app([add, repeat], app={"grpc": GrpcConfig()})
    call = serve(app)
    slow = add_request([1])
    slow.parameters["delay_s"].double_param = 3600
    timeout_s = 0.1
    while not add.requests:  # a busy machine may not come as far as the model in time
        assert refusal(lambda limit=timeout_s: call("ModelInfer", slow, timeout=limit))[0] == "DEADLINE_EXCEEDED"
        timeout_s *= 2
    until(lambda: add.num_cancelled == 1)
    slow.parameters["timeout"].int64_param = 20_000
    assert refusal(lambda: call("ModelInfer", slow)) == (
        "DEADLINE_EXCEEDED",
        "the request's deadline passed before its answer was there",
    )
    assert add.num_cancelled == 2
    stream = call.stream([text_request(b"w " * 1000, delay_s=0.005)])
    next(stream)
    stream.cancel()
    until(lambda: repeat.num_cancelled == 1)
    count, labels = "mlsys_inference_first_response_seconds_count", {"model": "repeat", "version": "1"}
    assert runtime_of(app).metrics.registry.get_sample_value(count, labels) == 1


def test_the_limits_of_the_app_hold(serve: Any, make_app: Any) -> None:
    app = make_app(app={"grpc": GrpcConfig()}, max_body_nbytes=1000, request_timeout_s=0.05, api_keys=frozenset({"k"}))
    call = serve(app, authorization="Bearer k")
    assert refusal(lambda: call("ModelInfer", add_request([0] * 500)))[0] == "RESOURCE_EXHAUSTED"
    slow = add_request([1])
    slow.parameters["delay_s"].double_param = 3600
    assert refusal(lambda: call("ModelInfer", slow))[0] == "DEADLINE_EXCEEDED"
    stranger = Client(app)
    assert stranger("ServerLive").live
    assert refusal(lambda: stranger("ModelInfer", add_request([1])))[0] == "UNAUTHENTICATED"
    assert refusal(lambda: list(stranger.stream([add_request([1])])))[0] == "UNAUTHENTICATED"


def test_a_drain_waits_for_calls_and_takes_no_others(make_app: Any, reference: ModuleType) -> None:
    model = reference.Add()
    model.is_held = True
    app = make_app([model], app={"grpc": GrpcConfig()}, drain_timeout_s=600)
    server = BackgroundServer(app).start()
    call = Client(app)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(call("ModelInfer", add_request([1], id="7"))))
    thread.start()
    until(lambda: len(model.requests) == 1)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    until(lambda: httpx.get(f"{server.url}/v2/health/ready").status_code == 503)
    assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
    assert call("ServerLive").live
    assert not call("ServerReady").ready
    assert refusal(lambda: call("ModelInfer", add_request([1])))[0] == "UNAVAILABLE"
    assert not answers
    model.is_held = False
    thread.join()
    stopping.join()
    assert (answers[0].id, model.is_closed) == ("7", True)


def test_the_end_of_a_drain_cuts_calls(make_app: Any, reference: ModuleType) -> None:
    model = reference.Add()
    model.is_held = True
    app = make_app([model], app={"grpc": GrpcConfig()}, drain_timeout_s=0.1)
    server = BackgroundServer(app).start()
    call = Client(app)
    refusals: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: refusals.append(refusal(lambda: call("ModelInfer", add_request([1])))))
    thread.start()
    until(lambda: len(model.requests) == 1)
    server.stop()
    thread.join()
    [(code, details)] = refusals
    assert (code, model.num_cancelled, model.is_closed) == ("UNAVAILABLE", 1, True)
    assert "shutting down" in details


def test_calls_are_counted_and_logged(call: Client, app: FastAPI, log: Any) -> None:
    call("ServerLive")
    refusal(lambda: call("ModelInfer", m.ModelInferRequest(model_name="nope")))
    assert '"method": "ModelInfer", "code": "NOT_FOUND"' in log.getvalue()


def test_a_port_that_is_taken_ends_the_start(app: FastAPI, call: Client, make_app: Any) -> None:
    taken = grpc_address_of(app)
    other = make_app(app={"grpc": GrpcConfig(port=taken.port)})
    with pytest.raises(ServingError, match="gRPC cannot listen on"):
        BackgroundServer(other).start()
    with pytest.raises(ServingError, match="serves no gRPC"):
        grpc_address_of(other)
