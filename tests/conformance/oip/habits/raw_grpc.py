"""Messages as strangers write them by hand, over gRPC."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import service_pb2 as pb  # type: ignore[attr-defined]
from tritonclient.grpc import service_pb2_grpc

from tests.conformance.oip.habits.case import Case, Server

TWO = struct.pack("<2f", 1, 2)
Ask = Callable[[Any], Any]


def call(server: Server, ask: Ask) -> Any:
    """Return what ``ask`` makes of a stub, or the status that it failed with."""
    with grpc.insecure_channel(server.grpc) as channel:
        try:
            return ask(service_pb2_grpc.GRPCInferenceServiceStub(channel))
        except grpc.RpcError as error:
            return [error.code().name, "error" if server.note(error.details()) else "no words"]  # type: ignore[attr-defined]


def tensor(name: str = "a", shape: Any = (1, 2), datatype: str = "FP32", **contents: Any) -> Any:
    """Return an input, with typed contents or none."""
    node = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    if contents:
        node.contents.CopyFrom(pb.InferTensorContents(**contents))
    return node


def request(*tensors: Any, model: str = "add", raw: Any = (), outputs: Any = (), **more: Any) -> Any:
    """Return a request."""
    message = pb.ModelInferRequest(model_name=model, inputs=tensors, raw_input_contents=raw, **more)
    for name in outputs:
        message.outputs.add(name=name)
    return message


def parameter(message: Any, name: str, **value: Any) -> Any:
    """Return the message with a parameter."""
    message.parameters[name].CopyFrom(pb.InferParameter(**value))
    return message


def with_classes(count: Any) -> Any:
    """Return a request for classes."""
    message = request(tensor(), raw=[TWO], outputs=["sum"])
    message.outputs[0].parameters["classification"].CopyFrom(count)
    return message


def found(message: Any) -> Any:
    """Return a response as JSON."""
    told = MessageToDict(message, preserving_proto_field_name=True)
    told["raw_output_contents"] = [raw.hex() for raw in message.raw_output_contents]
    return told


def echo(datatype: str, raw: Any = (), shape: Any = (1, 1), **contents: Any) -> Any:
    """Return a request that echoes one tensor."""
    name = datatype.lower()
    return request(tensor(name, shape, datatype, **contents), model="echo", raw=raw, outputs=[f"{name}_out"])


A = tensor()
INT = pb.InferParameter(int64_param=2)

REQUESTS: dict[str, Any] = {
    "raw contents": request(A, raw=[TWO]),
    "typed contents": request(tensor(fp32_contents=[1, 2])),
    "both": request(tensor(fp32_contents=[1, 2]), raw=[TWO]),
    "neither": request(A),
    "empty raw contents": request(A, raw=[b""]),
    "raw contents that are too short": request(A, raw=[TWO[:7]]),
    "raw contents that are too long": request(A, raw=[TWO + b"x"]),
    "raw contents of more inputs": request(A, raw=[TWO, TWO]),
    "raw contents of fewer inputs": request(A, tensor("b"), raw=[TWO]),
    "one input typed and one raw": request(A, tensor("b", fp32_contents=[1, 2]), raw=[TWO]),
    "too few typed contents": request(tensor(fp32_contents=[1])),
    "too many typed contents": request(tensor(fp32_contents=[1, 2, 3])),
    "contents of another type": request(tensor(int_contents=[1, 2])),
    "contents of two types": request(tensor(fp32_contents=[1, 2], int_contents=[1, 2])),
    "no model": request(A, raw=[TWO], model=""),
    "an unknown model": request(A, raw=[TWO], model="nope"),
    "a version": request(A, raw=[TWO], model_version="1"),
    "an unknown version": request(A, raw=[TWO], model_version="9"),
    "a version that is no number": request(A, raw=[TWO], model_version="x"),
    "a version 0": request(A, raw=[TWO], model_version="0"),
    "a version with a zero before it": request(A, raw=[TWO], model_version="01"),
    "an id": request(A, raw=[TWO], id="7"),
    "an id of other letters": request(A, raw=[TWO], id='ä"\n'),
    "no inputs": request(),
    "an input without a name": request(tensor(""), raw=[TWO]),
    "an unknown input": request(A, tensor("z"), raw=[TWO, TWO]),
    "an input twice": request(A, A, raw=[TWO, TWO]),
    "an output": request(A, raw=[TWO], outputs=["sum"]),
    "an unknown output": request(A, raw=[TWO], outputs=["z"]),
    "an output twice": request(A, raw=[TWO], outputs=["sum", "sum"]),
    "an output without a name": request(A, raw=[TWO], outputs=[""]),
    "no datatype": request(tensor(datatype=""), raw=[TWO]),
    "an unknown datatype": request(tensor(datatype="FP8"), raw=[TWO]),
    "another datatype": request(tensor(datatype="INT32"), raw=[TWO]),
    "no shape": request(tensor(shape=()), raw=[TWO]),
    "a negative size": request(tensor(shape=(-1, 2)), raw=[TWO]),
    "another rank": request(tensor(shape=(2,)), raw=[TWO]),
    "no rows": request(tensor(shape=(0, 2)), raw=[b""]),
    "rows of nothing": request(tensor(shape=(1, 0)), raw=[b""]),
    "too many rows": request(tensor(shape=(9, 1)), raw=[b"\0" * 36]),
    "a shape whose product is too large": request(tensor(shape=(2**32, 2**32)), raw=[TWO]),
    "inputs of different rows": request(A, tensor("b", (2, 1)), raw=[TWO, TWO]),
    "NaN": request(A, raw=[struct.pack("<2f", float("nan"), 1)]),
    "an unknown parameter": parameter(request(A, raw=[TWO]), "x", string_param="y"),
    "a parameter of uint64": parameter(request(A, raw=[TWO]), "x", uint64_param=2**64 - 1),
    "a parameter without a value": parameter(request(A, raw=[TWO]), "x"),
    "a priority": parameter(request(A, raw=[TWO]), "priority", int64_param=1),
    "a priority of uint64": parameter(request(A, raw=[TWO]), "priority", uint64_param=1),
    "a negative priority": parameter(request(A, raw=[TWO]), "priority", int64_param=-1),
    "a priority that is a string": parameter(request(A, raw=[TWO]), "priority", string_param="1"),
    "a timeout": parameter(request(A, raw=[TWO]), "timeout", int64_param=10_000_000),
    "a timeout that is a string": parameter(request(A, raw=[TWO]), "timeout", string_param="1"),
    "a sequence for a model without": parameter(request(A, raw=[TWO]), "sequence_id", int64_param=5),
    "a sequence of a string for a model without": parameter(request(A, raw=[TWO]), "sequence_id", string_param="x"),
    "classes": with_classes(INT),
    "classes as a string": with_classes(pb.InferParameter(string_param="2")),
    "a negative number of classes": with_classes(pb.InferParameter(int64_param=-1)),
    "a decoupled model": request(tensor("text", (1,), "BYTES", bytes_contents=[b"x"]), model="repeat"),
    "a model that fails": request(tensor("x", (1,), fp32_contents=[1]), model="broken"),
    "booleans": echo("BOOL", shape=(1, 2), bool_contents=[True, False]),
    "INT8": echo("INT8", int_contents=[-128]),
    "beyond INT8": echo("INT8", int_contents=[128]),
    "INT16": echo("INT16", int_contents=[-32768]),
    "INT32": echo("INT32", int_contents=[-(2**31)]),
    "INT64": echo("INT64", int64_contents=[-(2**63)]),
    "UINT8": echo("UINT8", uint_contents=[255]),
    "beyond UINT8": echo("UINT8", uint_contents=[256]),
    "UINT16": echo("UINT16", uint_contents=[65535]),
    "UINT32": echo("UINT32", uint_contents=[2**32 - 1]),
    "UINT64": echo("UINT64", uint64_contents=[2**64 - 1]),
    "FP16 raw": echo("FP16", raw=[b"\0\x38"]),
    "FP16 in contents of FP32": echo("FP16", fp32_contents=[0.5]),
    "FP64": echo("FP64", fp64_contents=[0.1]),
    "texts": echo("BYTES", shape=(1, 2), bytes_contents=[b"ab", b""]),
    "texts that are no UTF-8": echo("BYTES", bytes_contents=[b"\xff\xfe"]),
    "raw texts": echo("BYTES", raw=[struct.pack("<I", 2) + b"ab"]),
    "raw texts whose length is beyond the data": echo("BYTES", raw=[struct.pack("<I", 9) + b"ab"]),
    "raw texts, more than the shape": echo("BYTES", raw=[struct.pack("<I", 1) + b"a" + struct.pack("<I", 0)]),
    "no elements": echo("FP32", raw=[b""], shape=(0, 0)),
    "no elements, and no contents": echo("FP32", shape=(0, 0)),
    "booleans other than 0 and 1": echo("BOOL", raw=[b"\2"]),
}


def _metadata(stub: Any, **model: str) -> Any:
    told = MessageToDict(stub.ModelMetadata(pb.ModelMetadataRequest(**model)))
    return {name: value for name, value in told.items() if name != "platform"}


OTHERS: dict[str, Ask] = {
    "live": lambda stub: stub.ServerLive(pb.ServerLiveRequest()).live,
    "ready": lambda stub: stub.ServerReady(pb.ServerReadyRequest()).ready,
    "a model's readiness": lambda stub: stub.ModelReady(pb.ModelReadyRequest(name="add")).ready,
    "readiness of an unknown model": lambda stub: stub.ModelReady(pb.ModelReadyRequest(name="nope")).ready,
    "readiness of an unknown version": lambda stub: (
        stub.ModelReady(pb.ModelReadyRequest(name="add", version="9")).ready
    ),
    "readiness of a version that is no number": lambda stub: (
        stub.ModelReady(pb.ModelReadyRequest(name="add", version="x")).ready
    ),
    "readiness of no model": lambda stub: stub.ModelReady(pb.ModelReadyRequest()).ready,
    "metadata": lambda stub: _metadata(stub, name="add"),
    "metadata of a version": lambda stub: _metadata(stub, name="versioned", version="2"),
    "metadata of no model": lambda stub: MessageToDict(stub.ModelMetadata(pb.ModelMetadataRequest())),
    "metadata of an unknown model": lambda stub: MessageToDict(
        stub.ModelMetadata(pb.ModelMetadataRequest(name="nope"))
    ),
    "configuration of no model": lambda stub: MessageToDict(stub.ModelConfig(pb.ModelConfigRequest())),
    "configuration of an unknown model": lambda stub: MessageToDict(
        stub.ModelConfig(pb.ModelConfigRequest(name="nope"))
    ),
    "statistics of all models": lambda stub: sorted(
        {each.name for each in stub.ModelStatistics(pb.ModelStatisticsRequest()).model_stats}
    ),
    "statistics of an unknown model": lambda stub: MessageToDict(
        stub.ModelStatistics(pb.ModelStatisticsRequest(name="nope"))
    ),
    "a deadline that passes": lambda stub: stub.ModelInfer(
        request(tensor("x", (1, 1), fp32_contents=[0.5]), model="slow"), timeout=0.1
    ),
}


def _health(service: str) -> Callable[[Server], Any]:
    """Ask gRPC's own health service, as Kubernetes does."""

    def ask(server: Server) -> Any:
        name = service.encode()
        with grpc.insecure_channel(server.grpc) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            try:
                answer = check(b"\n" + bytes([len(name)]) + name if name else b"")  # HealthCheckRequest.service
            except grpc.RpcError as error:
                return [error.code().name]  # type: ignore[attr-defined]
        return list(answer)

    return ask


def _unknown_method(server: Server) -> Any:
    with grpc.insecure_channel(server.grpc) as channel:
        try:
            return list(channel.unary_unary("/inference.GRPCInferenceService/Nope")(b""))
        except grpc.RpcError as error:
            return error.code().name  # type: ignore[attr-defined]


def _no_message(server: Server) -> Any:
    with grpc.insecure_channel(server.grpc) as channel:
        try:
            return list(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff\xff"))
        except grpc.RpcError as error:
            return error.code().name  # type: ignore[attr-defined]


def _stream(*requests: Any) -> Callable[[Server], Any]:
    def ask(stub: Any) -> Any:
        answers = []
        for answer in stub.ModelStreamInfer(iter(requests), timeout=30):
            response = found(answer.infer_response)
            told = [response.get("model_name", ""), response.get("id", "")]
            final = response.get("parameters", {}).get("triton_final_response", {}).get("bool_param")
            answers.append(["error" if answer.error_message else response["raw_output_contents"], *told, final])
        return answers

    return lambda server: call(server, ask)


def _words(text: bytes, *, final: bool = False, **more: Any) -> Any:
    message = request(tensor("text", (1,), "BYTES", bytes_contents=[text]), model="repeat", **more)
    return parameter(message, "triton_enable_empty_final_response", bool_param=True) if final else message


STREAMS: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "one of a model with one response": (request(A, raw=[TWO], id="1"),),
    "two of a model with one response": (request(A, raw=[TWO], id="1"), request(A, raw=[TWO], id="2")),
    "words": (_words(b"x yy", id="1"),),
    "no words": (_words(b"", id="1"),),
    "words and an end": (_words(b"x yy", id="1", final=True),),
    "no words and an end": (_words(b"", id="1", final=True),),
    "an end of a model with one response": (
        parameter(request(A, raw=[TWO], id="1"), "triton_enable_empty_final_response", bool_param=True),
    ),
    "an end that is no boolean": (
        parameter(request(A, raw=[TWO], id="1"), "triton_enable_empty_final_response", int64_param=1),
    ),
    "an unknown model": (request(A, raw=[TWO], model="nope", id="1"),),
    "a wrong input and a right one": (request(tensor("z"), raw=[TWO], id="1"), request(A, raw=[TWO], id="2")),
    "a model that fails": (request(tensor("x", (1,), fp32_contents=[1]), model="broken", id="1"),),
}


def cases() -> list[Case]:
    """Return all of them."""
    made = [
        Case(
            f"gRPC: {name}",
            lambda server, message=message: call(server, lambda stub: found(stub.ModelInfer(message))),
        )
        for name, message in REQUESTS.items()
    ]
    made += [Case(f"gRPC: {name}", lambda server, ask=ask: call(server, ask)) for name, ask in OTHERS.items()]
    made += [Case(f"gRPC stream: {name}", _stream(*requests)) for name, requests in STREAMS.items()]
    return [
        *made,
        Case("gRPC: health of the server", _health("")),
        Case("gRPC: health of the service", _health("inference.GRPCInferenceService")),
        Case("gRPC: health of an unknown service", _health("nope")),
        Case("gRPC: an unknown method", _unknown_method),
        Case("gRPC: bytes that are no message", _no_message),
    ]
