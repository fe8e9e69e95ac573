"""Probes of a server by ``tritonclient``: one for each thing it can do, with the expected result.

The same probes run against mlsys (``test_tritonclient.py``) and against real Triton
(``benchmarks/peers/pytriton/server.py``). Where Triton's answer is another, the probe says so.

    python tests/conformance/oip/probes.py --http 127.0.0.1:8000 --grpc 127.0.0.1:8001 --server mlsys
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException


@dataclass(frozen=True)
class Urls:
    http: str  # host:port
    grpc: str


@dataclass(frozen=True)
class Probe:
    name: str
    run: Callable[[Urls], Any]
    expected: Any
    triton: Any  # what Triton gives


PROBES: list[Probe] = []
_SAME = object()


def probe(expected: Any, triton: Any = _SAME) -> Callable[[Callable[[Urls], Any]], Callable[[Urls], Any]]:
    """Register a probe; an exception of the client counts as ``{"error": status}``."""

    def register(function: Callable[[Urls], Any]) -> Callable[[Urls], Any]:
        name = function.__name__.replace("_", " ")
        PROBES.append(Probe(name, function, expected, expected if triton is _SAME else triton))
        return function

    return register


def outcome(probe: Probe, urls: Urls) -> Any:
    """Return the result of a probe as JSON."""
    try:
        return json.loads(json.dumps(probe.run(urls)))
    except InferenceServerException as error:
        return {"error": (error.status() or error.message()).removeprefix("StatusCode.")}


def http(urls: Urls) -> Any:
    return http_client.InferenceServerClient(urls.http)


def grpc(urls: Urls) -> Any:
    return grpc_client.InferenceServerClient(urls.grpc)


def tensor(module: Any, name: str, array: Any, datatype: str = "FP32", **options: Any) -> Any:
    built = module.InferInput(name, list(array.shape), datatype)
    built.set_data_from_numpy(array, **options)
    return built


def rows(module: Any, values: list[list[float]], name: str = "a", **options: Any) -> Any:
    return tensor(module, name, np.array(values, np.float32), **options)


# Health, metadata, repository


@probe([[True, True, True, False, False]] * 2)
def health(urls: Urls) -> Any:
    found = []
    for connect in (http, grpc):
        with connect(urls) as client:
            models = [client.is_model_ready(*model) for model in (("add",), ("nope",), ("add", "9"))]
            found.append([client.is_server_live(), client.is_server_ready(), *models])
    return found


def _metadata(metadata: Any) -> Any:
    tensors = [*metadata["inputs"], *metadata["outputs"]]
    return [metadata["name"], metadata["versions"]] + [
        [tensor["name"], tensor["datatype"], [int(size) for size in tensor["shape"]]] for tensor in tensors
    ]


ADD = ["add", ["1"], *([name, "FP32", [-1, -1]] for name in ("a", "b", "sum"))]


@probe([ADD, ADD])
def model_metadata(urls: Urls) -> Any:
    with http(urls) as by_http, grpc(urls) as by_grpc:
        metadata = by_grpc.get_model_metadata("add", "1", as_json=True)
        return [_metadata(by_http.get_model_metadata("add")), _metadata(metadata)]


def _config(config: Any) -> Any:
    tensors = [*config["input"], *config["output"]]
    return [int(config["max_batch_size"])] + [
        [tensor["name"], tensor["data_type"], [int(size) for size in tensor["dims"]]] for tensor in tensors
    ]


CONFIG = [8, *([name, "TYPE_FP32", [-1]] for name in ("a", "b", "sum"))]


@probe([CONFIG, CONFIG])
def model_config(urls: Urls) -> Any:
    with http(urls) as by_http, grpc(urls) as by_grpc:
        config = by_grpc.get_model_config("add", as_json=True)["config"]
        return [_config(by_http.get_model_config("add")), _config(config)]


@probe([False, True])
def model_config_says_what_is_decoupled(urls: Urls) -> Any:
    with http(urls) as client:
        policies = [client.get_model_config(name).get("model_transaction_policy", {}) for name in ("add", "repeat")]
        return [policy.get("decoupled", False) for policy in policies]


@probe({"error": "404"})
def http_metadata_of_an_unknown_model(urls: Urls) -> Any:
    return http(urls).get_model_metadata("nope")


@probe({"error": "NOT_FOUND"})
def grpc_metadata_of_an_unknown_model(urls: Urls) -> Any:
    return grpc(urls).get_model_metadata("nope", as_json=True)


@probe(["binary_tensor_data", "model_configuration", "statistics"])
def server_extensions(urls: Urls) -> Any:
    extensions = http(urls).get_server_metadata()["extensions"]
    return [name for name in ("binary_tensor_data", "model_configuration", "statistics") if name in extensions]


@probe([["add", "1", "READY"]], triton={"error": "403"})  # PyTriton restricts what it does not need itself
def http_repository_index(urls: Urls) -> Any:
    with http(urls) as client:
        index = client.get_model_repository_index()
    return [[model["name"], model["version"], model["state"]] for model in index if model["name"] == "add"]


@probe([["add", "1", "READY"]], triton={"error": "UNAVAILABLE"})
def grpc_repository_index(urls: Urls) -> Any:
    with grpc(urls) as client:
        index = client.get_model_repository_index(as_json=True)["models"]
    return [[model["name"], model["version"], model["state"]] for model in index if model["name"] == "add"]


@probe([1, 1], triton={"error": "403"})
def statistics_count_requests(urls: Urls) -> Any:
    counts = []
    with http(urls) as by_http, grpc(urls) as by_grpc:
        before = by_http.get_inference_statistics("upper")["model_stats"][0]
        text = tensor(http_client, "text_input", np.array([[b"a"]], np.object_), "BYTES")
        by_http.infer("upper", [text])
        after = by_grpc.get_inference_statistics("upper", as_json=True)["model_stats"][0]
        counts.append(int(after["inference_count"]) - before["inference_count"])
        success = before["inference_stats"]["success"]["count"]
        counts.append(int(after["inference_stats"]["success"]["count"]) - success)
    return counts


# Inference over REST


@probe([["add", "1", "7"], [[3.0, 4.0]]])
def http_infer_binary(urls: Urls) -> Any:
    with http(urls) as client:
        inputs = [rows(http_client, [[1, 2]]), rows(http_client, [[2, 2]], "b")]
        result = client.infer("add", inputs, request_id="7")
        response = result.get_response()
        names = [response["model_name"], response["model_version"], response["id"]]
        return [names, result.as_numpy("sum").tolist()]


@probe([[1.0, 2.0], False])
def http_infer_json(urls: Urls) -> Any:
    with http(urls) as client:
        output = http_client.InferRequestedOutput("sum", binary_data=False)
        result = client.infer("add", [rows(http_client, [[1, 2]], binary_data=False)], outputs=[output])
        return [result.get_output("sum")["data"], "parameters" in result.get_output("sum")]


@probe([[[0.0]] * 3] * 2)
def http_infer_compressed(urls: Urls) -> Any:
    with http(urls) as client:
        return [
            client.infer(
                "add",
                [rows(http_client, [[0]] * 3)],
                request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )
            .as_numpy("sum")
            .tolist()
            for algorithm in ("gzip", "deflate")
        ]


@probe([[[0.0], [1.0], [2.0], [3.0]], "1"])
def http_infer_of_a_large_tensor_with_a_version(urls: Urls) -> Any:
    with http(urls) as client:
        array = np.repeat(np.arange(4, dtype=np.float32)[:, None], 100_000, axis=1)
        result = client.infer("add", [tensor(http_client, "a", array)], model_version="1")
        return [result.as_numpy("sum")[:, -1:].tolist(), result.get_response()["model_version"]]


@probe([[float(number)] for number in range(20)])
def http_async_infer(urls: Urls) -> Any:
    with http_client.InferenceServerClient(urls.http, concurrency=4) as client:
        pending = [client.async_infer("add", [rows(http_client, [[number]])]) for number in range(20)]
        return [request.get_result().as_numpy("sum")[0].tolist() for request in pending]


@probe([[float(number)] for number in range(20)])
def http_aio_infer(urls: Urls) -> Any:
    async def main() -> Any:
        async with http_aio.InferenceServerClient(urls.http) as client:
            assert await client.is_model_ready("add")
            calls = [client.infer("add", [rows(http_aio, [[number]])]) for number in range(20)]
            return [result.as_numpy("sum")[0].tolist() for result in await asyncio.gather(*calls)]

    return asyncio.run(main())


VALUES = {
    "BOOL": [[True, False]],
    **{f"INT{bits}": [[-(2 ** (bits - 1)), 1]] for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": [[2**bits - 1, 1]] for bits in (8, 16, 32, 64)},
    "FP16": [[0.5, -2.0]],
    "FP32": [[0.5, -2.0]],
    "FP64": [[0.1, -2.0]],
    "BYTES": [["ä", "bc"]],
}


def _echo(module: Any, client: Any) -> Any:
    back = {}
    for datatype, values in VALUES.items():
        name = datatype.lower()
        if datatype == "BYTES":
            array = np.array([[text.encode() for text in values[0]]], np.object_)
        else:
            array = np.array(values, name.replace("fp", "float"))
        output = module.InferRequestedOutput(f"{name}_out")
        result = client.infer("echo", [tensor(module, name, array, datatype)], outputs=[output])
        got = result.as_numpy(f"{name}_out").tolist()
        back[datatype] = [[element.decode() for element in got[0]]] if datatype == "BYTES" else got
    return back


@probe(VALUES)
def http_every_datatype(urls: Urls) -> Any:
    with http(urls) as client:
        return _echo(http_client, client)


@probe(VALUES)
def grpc_every_datatype(urls: Urls) -> Any:
    with grpc(urls) as client:
        return _echo(grpc_client, client)


@probe([[1.5, -3.0]], triton={"error": "PyTriton has no BF16"})
def http_bf16(urls: Urls) -> Any:
    with http(urls) as client:
        array = np.array([[1.5, -3.0]], ml_dtypes.bfloat16)
        output = http_client.InferRequestedOutput("bf16_out")
        try:
            result = client.infer("echo", [tensor(http_client, "bf16", array, "BF16")], outputs=[output])
        except InferenceServerException as error:
            raise InferenceServerException("PyTriton has no BF16") from error
        return result.as_numpy("bf16_out").tolist()


@probe([["5.000000:1", "3.000000:2"]])
def http_classification(urls: Urls) -> Any:
    with http(urls) as client:
        output = http_client.InferRequestedOutput("sum", class_count=2)
        result = client.infer("add", [rows(http_client, [[1, 5, 3]])], outputs=[output])
        return [[":".join(text.decode().split(":")[:2]) for text in row] for row in result.as_numpy("sum")]


# Inference over gRPC


@probe([["add", "1", "7"], [[3.0, 4.0]]])
def grpc_infer(urls: Urls) -> Any:
    with grpc(urls) as client:
        inputs = [rows(grpc_client, [[1, 2]]), rows(grpc_client, [[2, 2]], "b")]
        result = client.infer("add", inputs, request_id="7")
        response = result.get_response()
        return [[response.model_name, response.model_version, response.id], result.as_numpy("sum").tolist()]


@probe([[0.0], [0.0]])
def grpc_infer_compressed(urls: Urls) -> Any:
    with grpc(urls) as client:
        return [
            client.infer("add", [rows(grpc_client, [[0]])], compression_algorithm=algorithm).as_numpy("sum")[0].tolist()
            for algorithm in ("gzip", "deflate")
        ]


@probe([[float(number)] for number in range(20)])
def grpc_aio_infer(urls: Urls) -> Any:
    async def main() -> Any:
        async with grpc_aio.InferenceServerClient(urls.grpc) as client:
            assert await client.is_model_ready("add")
            calls = [client.infer("add", [rows(grpc_aio, [[number]])]) for number in range(20)]
            return [result.as_numpy("sum")[0].tolist() for result in await asyncio.gather(*calls)]

    return asyncio.run(main())


def _stream(urls: Urls, send: Callable[[Any], None], count: int) -> list[Any]:
    answers: queue.Queue[Any] = queue.Queue()
    with grpc(urls) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        send(client)
        got = [answers.get(timeout=60) for _ in range(count)]
        client.stop_stream()
    return got


def _words(name: str = "repeat") -> Any:
    return tensor(grpc_client, "text", np.array([b"x yy"], np.object_), "BYTES")


@probe([["1", "x", 0], ["1", "yy", 1]])
def grpc_stream_of_a_decoupled_model(urls: Urls) -> Any:
    got = _stream(urls, lambda client: client.async_stream_infer("repeat", [_words()], request_id="1"), 2)
    return [
        [result.get_response().id, result.as_numpy("word")[0].decode(), int(result.as_numpy("index")[0])]
        for result, _ in got
    ]


@probe([[False, 2], [False, 2], [True, 0]])
def grpc_stream_with_an_empty_final_response(urls: Urls) -> Any:
    def send(client: Any) -> None:
        client.async_stream_infer("repeat", [_words()], enable_empty_final_response=True)

    return [
        [result.get_response().parameters["triton_final_response"].bool_param, len(result.get_response().outputs)]
        for result, _ in _stream(urls, send, 3)
    ]


@probe([[str(number), float(number)] for number in range(20)])
def grpc_stream_keeps_the_order_of_a_model_with_one_response(urls: Urls) -> Any:
    def send(client: Any) -> None:
        for number in range(20):
            client.async_stream_infer("add", [rows(grpc_client, [[number]])], request_id=str(number))

    return [[result.get_response().id, float(result.as_numpy("sum")[0, 0])] for result, _ in _stream(urls, send, 20)]


@probe([True, "2"])
def grpc_stream_goes_on_after_an_error(urls: Urls) -> Any:
    def send(client: Any) -> None:
        client.async_stream_infer("nope", [_words()], request_id="1")
        client.async_stream_infer("add", [rows(grpc_client, [[0]])], request_id="2")

    (_, error), (result, _) = _stream(urls, send, 2)
    return [isinstance(error, InferenceServerException), result.get_response().id]


@probe([["x", "yy"]])
def grpc_aio_stream(urls: Urls) -> Any:
    async def main() -> Any:
        async def requests() -> Any:
            yield {"model_name": "repeat", "inputs": [_words()]}

        async with grpc_aio.InferenceServerClient(urls.grpc) as client:
            words = [
                result.as_numpy("word")[0].decode()
                async for result, error in client.stream_infer(requests())
                if error is None
            ]
        return [words]

    return asyncio.run(main())


# What is refused


def text(module: Any) -> Any:
    return tensor(module, "text", np.array([b"x"], np.object_), "BYTES")


BAD, UNKNOWN = ["400", "INVALID_ARGUMENT"], ["404", "NOT_FOUND"]
# Name: (model, version, input of a client's module, output, statuses over HTTP and gRPC)
REFUSED: dict[str, tuple[str, str, Callable[[Any], Any], str, list[str]]] = {
    "an unknown model": ("nope", "", lambda module: rows(module, [[0]]), "", UNKNOWN),
    "an unknown version": ("add", "9", lambda module: rows(module, [[0]]), "", UNKNOWN),
    "another datatype": ("add", "", lambda module: tensor(module, "a", np.zeros((1, 1), np.int32), "INT32"), "", BAD),
    "another rank": ("add", "", lambda module: tensor(module, "a", np.zeros((1, 1, 1), np.float32)), "", BAD),
    "an unknown input": ("add", "", lambda module: rows(module, [[0]], "z"), "", BAD),
    "too many rows": ("add", "", lambda module: rows(module, [[0]] * 9), "", BAD),
    "an unknown output": ("add", "", lambda module: rows(module, [[0]]), "z", BAD),
    "no input": ("add", "", lambda module: rows(module, [[0]], "b"), "", BAD),
    "a decoupled model": ("repeat", "", text, "", ["501", "UNIMPLEMENTED"]),
}
TRITON_REFUSED = {"no input": ["500", "INTERNAL"]}  # PyTriton's model fails on it


def refused_by_both(urls: Urls, model: str, version: str, build: Callable[[Any], Any], output: str) -> list[str]:
    statuses = []
    for module, connect in ((http_client, http), (grpc_client, grpc)):
        with connect(urls) as client:
            outputs = [module.InferRequestedOutput(output)] if output else None
            try:
                client.infer(model, [build(module)], model_version=version, outputs=outputs)
                statuses.append("answered")
            except InferenceServerException as error:
                statuses.append((error.status() or error.message()).removeprefix("StatusCode."))
    return statuses


for _name, (*_call, _statuses) in REFUSED.items():
    PROBES.append(
        Probe(
            f"infer with {_name}",
            lambda urls, call=_call: refused_by_both(urls, *call),
            _statuses,
            TRITON_REFUSED.get(_name, _statuses),
        )
    )


def main() -> int:
    """Run all probes against one server; 1 if one of them came out unexpectedly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http", required=True, help="host:port")
    parser.add_argument("--grpc", required=True, help="host:port")
    parser.add_argument("--server", choices=["mlsys", "triton"], default="mlsys", help="whose answers are expected")
    options = parser.parse_args()
    urls, num_failed = Urls(options.http, options.grpc), 0
    for entry in PROBES:
        expected = json.loads(json.dumps(entry.expected if options.server == "mlsys" else entry.triton))
        got = outcome(entry, urls)
        num_failed += got != expected
        print(f"{'ok  ' if got == expected else 'FAIL'} {entry.name}" + ("" if got == expected else f": {got}"))
    print(f"{len(PROBES) - num_failed} of {len(PROBES)} as expected of {options.server}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
