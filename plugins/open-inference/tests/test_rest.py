from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
from mlsys_core.errors import InvalidInputError
from mlsys_open_inference.tensors import to_raw
from mlsys_serving.http import BackgroundServer
from mlsys_serving.models import DataType


def binary_body(request: dict[str, Any], *raw: bytes) -> tuple[bytes, dict[str, str]]:
    """A body with the tensors' bytes behind the JSON, and its headers."""
    header = json.dumps(request).encode()
    return b"".join([header, *raw]), {"inference-header-content-length": str(len(header))}


def split(response: httpx.Response) -> tuple[dict[str, Any], bytes]:
    length = int(response.headers["inference-header-content-length"])
    return json.loads(response.content[:length]), response.content[length:]


def row(name: str, data: list[float]) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": [1, len(data)], "data": data}


async def test_json_in_and_out(client: httpx.AsyncClient) -> None:
    body = {"id": "7", "inputs": [row("a", [1, 2]), row("b", [0.5, 1.5])]}
    response = await client.post("/v2/models/add/infer", json=body)
    assert response.status_code == 200, response.text
    assert response.json() == {
        "model_name": "add",
        "model_version": "1",
        "id": "7",
        "outputs": [{"name": "sum", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 3.5]}],
    }
    assert response.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in response.headers


async def test_binary_in_and_out(client: httpx.AsyncClient) -> None:
    tensors = [
        {"name": name, "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}} for name in "ab"
    ]
    request = {"inputs": tensors, "parameters": {"binary_data_output": True}}
    first, second = np.float32([1, 2]).tobytes(), np.float32([10, 20]).tobytes()
    content, headers = binary_body(request, first, second)
    response = await client.post("/v2/models/add/versions/1/infer", content=content, headers=headers)
    answer, raw = split(response)
    assert answer["outputs"] == [
        {"name": "sum", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    ]
    assert np.frombuffer(raw, np.float32).tolist() == [11, 22]
    assert response.headers["content-type"] == "application/octet-stream"


async def test_binary_and_json_may_be_mixed_in_one_request(client: httpx.AsyncClient) -> None:
    tensor = {"name": "b", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    content, headers = binary_body({"inputs": [row("a", [1, 2]), tensor]}, np.float32([10, 20]).tobytes())
    response = await client.post("/v2/models/add/infer", content=content, headers=headers)
    assert response.json()["outputs"][0]["data"] == [11, 22]


@pytest.mark.parametrize("default", [False, True], ids=["json by default", "binary by default"])
async def test_an_output_says_itself_how_it_is_written(client: httpx.AsyncClient, default: bool) -> None:
    inputs = [{"name": "int8", "datatype": "INT8", "shape": [1, 2], "data": [1, 2]}]
    outputs = [{"name": "int8_out", "parameters": {"binary_data": not default}}, {"name": "fp32_out"}]
    request = {"inputs": inputs, "outputs": outputs, "parameters": {"binary_data_output": default}}
    response = await client.post("/v2/models/echo/infer", json=request)
    answer, raw = (response.json(), b"") if default else split(response)  # no bytes: a JSON body
    int8, fp32 = answer["outputs"]
    assert [int8["name"], fp32["name"]] == ["int8_out", "fp32_out"]
    assert ("data" in int8, "data" in fp32) == (default, not default)
    assert raw == (b"" if default else b"\1\2")


VALUES: dict[DataType, list[Any]] = {
    DataType.BOOL: [True, False],
    DataType.UINT64: [2**64 - 1, 0],
    DataType.INT64: [-(2**63), 2**63 - 1],
    DataType.FP16: [1.5, -65504.0],
    DataType.FP64: [1e300, -0.1],
    DataType.BF16: [1.5, -3.0],
    DataType.BYTES: ["ä€", ""],
}


@pytest.mark.parametrize("datatype", DataType, ids=lambda datatype: datatype.value)
async def test_every_datatype_both_ways(client: httpx.AsyncClient, datatype: DataType) -> None:
    values = VALUES.get(datatype, [1, 100])
    name = datatype.value.lower()
    tensor = {"name": name, "datatype": datatype.value, "shape": [1, 2]}
    request = {"inputs": [tensor | {"data": values}], "outputs": [{"name": f"{name}_out"}]}
    response = await client.post("/v2/models/echo/infer", json=request)
    assert response.json()["outputs"] == [tensor | {"name": f"{name}_out", "data": values}]
    elements = [value.encode() for value in values] if datatype is DataType.BYTES else values
    raw = bytes(to_raw(np.array(elements, datatype.dtype), datatype))
    request = {
        "inputs": [tensor | {"parameters": {"binary_data_size": len(raw)}}],
        "outputs": [{"name": f"{name}_out", "parameters": {"binary_data": True}}],
    }
    content, headers = binary_body(request, raw)
    _, back = split(await client.post("/v2/models/echo/infer", content=content, headers=headers))
    assert back == raw


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_requests_and_responses(client: httpx.AsyncClient, encoding: str) -> None:
    body = json.dumps({"inputs": [row("a", [1.0] * 2000)]}).encode()
    packed = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
    headers = {"content-encoding": encoding, "accept-encoding": encoding}
    response = await client.post("/v2/models/add/infer", content=packed, headers=headers)
    assert response.headers["content-encoding"] == encoding
    assert response.json()["outputs"][0]["data"] == [1.0] * 2000
    plain = await client.post("/v2/models/add/infer", content=body, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers


async def test_a_compressed_binary_response_keeps_the_length_of_its_json(client: httpx.AsyncClient) -> None:
    request = {"inputs": [row("a", [1.0] * 2000)], "parameters": {"binary_data_output": True}}
    response = await client.post("/v2/models/add/infer", json=request, headers={"accept-encoding": "gzip"})
    assert response.headers["content-encoding"] == "gzip"
    _, raw = split(response)
    assert np.frombuffer(raw, np.float32).tolist() == [1.0] * 2000


async def test_tensors_of_binary_requests_are_aligned(
    client: httpx.AsyncClient, make_app: Any, reference: ModuleType
) -> None:
    model = reference.Echo()
    transport = httpx.ASGITransport(make_app([model]))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for pad in range(9):
            request = {
                "id": "x" * pad,
                "inputs": [
                    {"name": "fp64", "datatype": "FP64", "shape": [1, 3], "parameters": {"binary_data_size": 24}}
                ],
            }
            content, headers = binary_body(request, np.arange(3, dtype=np.float64).tobytes())
            assert (await client.post("/v2/models/echo/infer", content=content, headers=headers)).status_code == 200
    arrays = [request.inputs["fp64"] for request in model.requests]
    assert all(array.flags.aligned and not array.flags.writeable for array in arrays)
    assert all(array.tolist() == [[0, 1, 2]] for array in arrays)


async def test_classifications(client: httpx.AsyncClient) -> None:
    output = {"name": "sum", "parameters": {"classification": 2}}
    response = await client.post("/v2/models/add/infer", json={"inputs": [row("a", [1, 5, 3])], "outputs": [output]})
    assert response.json()["outputs"] == [
        {"name": "sum", "datatype": "BYTES", "shape": [1, 2], "data": ["5.000000:1:one", "3.000000:2:two"]}
    ]


async def test_parameters_reach_the_model_and_come_back(
    client: httpx.AsyncClient, make_app: Any, reference: ModuleType
) -> None:
    model = reference.Echo()
    transport = httpx.ASGITransport(make_app([model]))
    parameters = {"text": "a", "number": 1.5, "flag": True, "priority": 3, "timeout": 2_000_000}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        request = {"inputs": [], "outputs": [{"name": "fp32_out"}], "parameters": parameters}
        response = await client.post("/v2/models/echo/infer", json=request)
        await client.post("/v2/models/echo/infer", json={"inputs": []})
    kept = {"text": "a", "number": 1.5, "flag": True}
    assert response.json()["parameters"] == kept
    first, second = model.requests
    assert (first.parameters, first.priority, second.priority, second.deadline_s) == (kept, 3, 0, None)
    assert first.deadline_s is not None
    assert first.key != second.key
    assert first.outputs == ("fp32_out",)


async def test_the_servers_own_description(client: httpx.AsyncClient) -> None:
    server = (await client.get("/v2")).json()
    assert server["name"] == "mlsys"
    assert "binary_tensor_data" in server["extensions"]
    assert not {"cuda_shared_memory", "generate", "logging", "system_shared_memory", "trace"} & set(
        server["extensions"]
    )
    for path in ("/v2/models/add", "/v2/models/add/versions/1"):
        assert (await client.get(path)).json() == {
            "name": "add",
            "versions": ["1"],
            "platform": "mlsys",
            "inputs": [{"name": name, "datatype": "FP32", "shape": [-1, -1]} for name in "ab"],
            "outputs": [{"name": "sum", "datatype": "FP32", "shape": [-1, -1]}],
        }
    config = (await client.get("/v2/models/add/config")).json()
    assert config["max_batch_size"] == 8
    assert config["input"][0] == {"name": "a", "data_type": "TYPE_FP32", "dims": [-1], "optional": False}
    assert config["parameters"] == {"doc": {"string_value": "adds"}}
    decoupled = {
        name: (await client.get(f"/v2/models/{name}/config")).json()["model_transaction_policy"]["decoupled"]
        for name in ("add", "repeat")
    }
    assert decoupled == {"add": False, "repeat": True}
    assert (await client.get("/v2/models/add/ready")).status_code == 200
    assert (await client.get("/v2/health/live")).json() == {"live": True}
    assert (await client.get("/v2/models/add/ready")).json() == {"name": "add", "ready": True}


async def test_statistics_and_metrics_have_the_same_numbers(client: httpx.AsyncClient) -> None:
    two_rows = {"name": "a", "datatype": "FP32", "shape": [2, 1], "data": [1, 2]}
    for inputs in ([two_rows], [two_rows], [row("a", [1])], [row("nope", [1])]):
        await client.post("/v2/models/add/infer", json={"inputs": inputs})
    [stats] = (await client.get("/v2/models/add/stats")).json()["model_stats"]
    assert (stats["name"], stats["version"], stats["inference_count"], stats["execution_count"]) == ("add", "1", 5, 3)
    inference = stats["inference_stats"]
    assert (inference["success"]["count"], inference["fail"]["count"]) == (3, 1)
    assert inference["queue"] == {"count": 3, "ns": 750_000_000}  # what the model said
    assert inference["compute_infer"] == {"count": 3, "ns": 1_500_000_000}
    assert [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in stats["batch_stats"]] == [
        (1, 1),
        (2, 2),
    ]
    metrics = (await client.get("/metrics")).text
    labels = '{model="add",version="1"}'
    for line in (
        f"nv_inference_request_success{labels} 3.0",
        'nv_inference_request_failure{model="add",reason="OTHER",version="1"} 1.0',
        f"nv_inference_count{labels} 5.0",
        f"nv_inference_exec_count{labels} 3.0",
        f"nv_inference_queue_duration_us{labels} 750000.0",
        f"nv_inference_compute_infer_duration_us{labels} 1.5e+06",
        'mlsys_inference_queue_seconds_bucket{le="0.25",model="add",version="1"} 3.0',
        'mlsys_inference_queue_seconds_bucket{le="0.1",model="add",version="1"} 0.0',
        f"mlsys_inference_compute_seconds_sum{labels} 1.5",
        f"nv_inference_pending_request_count{labels} 0.0",
    ):
        assert line in metrics.splitlines()
    assert 'route="/v2/models/{model}/infer"' in metrics
    everyone = (await client.get("/v2/models/stats")).json()["model_stats"]
    assert [stats["name"] for stats in everyone] == ["add", "echo", "repeat", "upper", "broken"]


async def test_a_model_that_batches_counts_its_executions_itself(client: httpx.AsyncClient) -> None:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}
    await client.post("/v2/models/upper/infer", json={"inputs": [text]})
    [stats] = (await client.get("/v2/models/upper/stats")).json()["model_stats"]
    assert (stats["inference_count"], stats["execution_count"]) == (1, 1)
    assert stats["batch_stats"][0]["batch_size"] == 4
    assert stats["batch_stats"][0]["compute_infer"] == {"count": 1, "ns": 125_000_000}


@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
async def test_a_body_in_parts_is_read_into_place(make_app: Any, reference: ModuleType, is_declared: bool) -> None:
    model = reference.Echo()
    array = np.arange(3000, dtype=np.float64)[None]
    tensor = {"name": "fp64", "datatype": "FP64", "shape": [1, 3000], "parameters": {"binary_data_size": array.nbytes}}
    content, headers = binary_body({"id": "x", "inputs": [tensor]}, array.tobytes())
    if is_declared:
        headers["content-length"] = str(len(content))

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]

    with BackgroundServer(make_app([model])) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            response = await client.post("/v2/models/echo/infer", content=parts(), headers=headers)
    assert response.status_code == 200
    [request] = model.requests
    got = request.inputs["fp64"]
    np.testing.assert_array_equal(got, array)
    assert got.flags.aligned
    assert not got.flags.writeable
    assert not got.flags.owndata  # read where it stays, and viewed there


async def test_the_repository_over_rest(make_app: Any, reference: ModuleType) -> None:
    class Source:
        def names(self) -> list[str]:
            return ["add", "bad"]

        async def load(self, name: str) -> list[Any]:
            if name == "bad":
                raise InvalidInputError("weights.bin is cut off")
            return [reference.Add()]

    app = make_app([], source=Source())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

        async def post(path: str, body: Any = None) -> httpx.Response:
            return await client.post(f"/v2/repository/{path}", json=body)

        assert (await post("index")).json() == [{"name": "add"}, {"name": "bad"}]
        assert (await client.get("/v2/models/add/ready")).status_code == 404
        assert (await post("models/add/load")).status_code == 200
        refused = await post("models/bad/load", {})
        assert (refused.status_code, list(refused.json())) == (400, ["error"])
        assert "weights.bin is cut off" in refused.json()["error"]
        assert (await post("index", {"ready": True})).json() == [{"name": "add", "version": "1", "state": "READY"}]
        assert (await post("index")).json()[1] == {
            "name": "bad",
            "state": "UNAVAILABLE",
            "reason": "weights.bin is cut off",
        }
        assert (await client.get("/v2/models/add/ready")).status_code == 200
        assert (await post("models/add/load", {"parameters": {"file:1/a": "x"}})).status_code == 501
        assert (await post("models/add/unload", {"parameters": {"unload_dependents": False}})).status_code == 200
        assert (await post("models/add/unload")).status_code == 200
        assert (await post("models/nope/unload")).status_code == 404
        refused = await post("models/nope/load")
        assert refused.status_code == 400
        assert refused.json()["error"] == "there is no model 'nope' to load; there are: add, bad"
        assert "nope" not in (await post("index")).text
        assert (await post("index", [])).status_code == 400
        assert (await post("index", {"ready": 1})).status_code == 400
