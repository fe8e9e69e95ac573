"""Each malformed request gets its own clear refusal, over REST and gRPC alike where both can send it."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

GOOD = {"name": "a", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
BINARY = {"name": "a", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}


def with_input(**changes: Any) -> dict[str, Any]:
    tensor = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    return {"inputs": [tensor]}


BAD_REQUESTS: dict[str, tuple[Any, str]] = {
    "no object": ([1], "a JSON object, got list"),
    "no inputs": ({}, "'inputs' of the request is an array of objects, got nothing"),
    "inputs no array": ({"inputs": {}}, "'inputs' of the request is an array of objects, got dict"),
    "unknown input": (with_input(name="z"), "has no input 'z'; its inputs are 'a', 'b'"),
    "name no string": (with_input(name=1), "'name' of an input is a string, got int"),
    "missing input": ({"inputs": [GOOD | {"name": "b"}]}, "needs the inputs ['a'], which are not given"),
    "input twice": ({"inputs": [GOOD, GOOD]}, "input 'a' is given twice"),
    "datatype": (with_input(datatype="INT32"), "input 'a' is INT32, but model 'add' takes FP32"),
    "no datatype": (with_input(datatype=...), "'datatype' of input 'a' is a string, got nothing"),
    "rank": (with_input(shape=[2]), "has shape [2], but model 'add' takes [-1, -1]"),
    "shape no array": (with_input(shape="2"), "'shape' of input 'a' is an array"),
    "size fractional": (with_input(shape=[1.0, 2]), "no whole number from 0 on: 1.0"),
    "too large and empty": (with_input(shape=[2**62, 0], data=[]), "which is too large"),
    "data and shape": (with_input(data=[1]), "has 1 elements of data, but shape [1, 2] takes 2"),
    "text as number": (with_input(data=["1", "2"]), "not all FP32"),
    "too many rows": (with_input(shape=[9, 1], data=[0] * 9), "has 9 rows; model 'add' takes 1 to 8"),
    "no rows": (with_input(shape=[0, 2], data=[]), "has 0 rows"),
    "rows differ": (
        {"inputs": [GOOD, GOOD | {"name": "b", "shape": [2, 1]}]},
        "input 'b' has 2 rows, other inputs have 1",
    ),
    "unknown output": ({"inputs": [GOOD], "outputs": [{"name": "z"}]}, "has no output 'z'; its outputs are 'sum'"),
    "id": ({"inputs": [GOOD], "id": 7}, "'id' of the request is a string, got int"),
    "parameters": ({"inputs": [GOOD], "parameters": []}, "'parameters' of the request is an object"),
    "parameter null": ({"inputs": [GOOD], "parameters": {"x": None}}, "got nothing"),
    "priority": ({"inputs": [GOOD], "parameters": {"priority": -1}}, "'priority' is a whole number from 0 to"),
    "timeout": ({"inputs": [GOOD], "parameters": {"timeout": 1.5}}, "'timeout' is a whole number"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_request_is_refused_in_the_protocols_shape(client: httpx.AsyncClient, name: str) -> None:
    body, message = BAD_REQUESTS[name]
    response = await client.post("/v2/models/add/infer", json=body)
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["error"]
    assert message in response.json()["error"]
    good = await client.post("/v2/models/add/infer", json={"inputs": [GOOD]})
    assert good.status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
    [
        (b"{", {}, 400, "not valid JSON"),
        (b'{"inputs": [NaN]}', {}, 400, "NaN and Infinity are no JSON values"),
        (b'{"id": "\\ud800", "inputs": []}', {}, 400, "half of a surrogate pair"),
        (b'{"id": "\xff"}', {}, 400, "not valid UTF-8"),
        (json.dumps({"inputs": [GOOD]}).replace("[1, 2]}", "[1, 1e400]}").encode(), {}, 400, "too large for a double"),
        (b"[" * 100000, {}, 400, "not valid JSON"),
        (b"{}", {"inference-header-content-length": "9"}, 400, "but the body has 2 bytes"),
        (b"{}", {"inference-header-content-length": "-1"}, 400, "is a number of bytes, got '-1'"),
        (b"{}", {"content-encoding": "br"}, 415, "gzip or deflate, got 'br'"),
        (b"{}", {"content-encoding": "gzip"}, 400, "the body is no gzip"),
        (gzip.compress(b"{}")[:-3], {"content-encoding": "gzip"}, 400, "cut off"),
        (gzip.compress(b"{}") + b"x", {"content-encoding": "gzip"}, 400, "something follows"),
        (gzip.compress(bytes(65 * 2**20)), {"content-encoding": "gzip"}, 413, "larger than 67108864 bytes"),
    ],
    ids=[
        "cut off", "nan", "surrogate", "utf-8", "1e400", "deep", "header too long", "header negative",
        "encoding", "no gzip", "gzip cut off", "gzip and more", "gzip bomb",
    ],
)  # fmt: skip
async def test_a_bad_body_is_refused(
    client: httpx.AsyncClient, content: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    response = await client.post("/v2/models/add/infer", content=content, headers=headers)
    assert (response.status_code, list(response.json())) == (status, ["error"])
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    ("tensors", "rest", "message"),
    [
        ([BINARY], b"1234567", "'binary_data_size' 8, but 7 bytes are left"),
        ([BINARY | {"parameters": {"binary_data_size": 4}}], b"1234", "has 4 bytes of data, but FP32 of shape [1, 2]"),
        ([BINARY], b"\0\0\xc0\x7f\0\0\0\0", "holds NaN or infinity, which the model does not take"),
    ],
    ids=["truncated", "size", "nan"],
)
async def test_bad_binary_data_is_refused(
    client: httpx.AsyncClient, tensors: list[dict[str, Any]], rest: bytes, message: str
) -> None:
    header = json.dumps({"inputs": tensors}).encode()
    headers = {"inference-header-content-length": str(len(header))}
    response = await client.post("/v2/models/add/infer", content=header + rest, headers=headers)
    assert response.status_code == 400
    assert message in response.json()["error"]


async def test_text_that_is_none_is_refused_where_the_model_takes_text(client: httpx.AsyncClient) -> None:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 5}}
    header = json.dumps({"inputs": [tensor]}).encode()
    headers = {"inference-header-content-length": str(len(header))}
    content = header + b"\1\0\0\0\xff"
    response = await client.post("/v2/models/upper/infer", content=content, headers=headers)
    assert response.status_code == 400
    assert "no UTF-8" in response.json()["error"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v2/models/nope/infer", 404, "there is no model 'nope' here"),
        ("/v2/models/add/versions/9/infer", 404, "there is no version '9' of model 'add' here; there are: 1"),
        ("/v2/models/add/versions/x/infer", 404, "there is no version 'x'"),
        ("/v2/models/repeat/infer", 501, "gives any number of responses"),
        ("/v2/systemsharedmemory/region/x/register", 501, "send tensors as binary data"),
        ("/v2/cudasharedmemory/unregister", 501, "send tensors as binary data"),
        ("/v2/trace/setting", 501, "--otlp-endpoint and OTEL_TRACES_SAMPLER"),
        ("/v2/models/add/trace/setting", 501, "--otlp-endpoint and OTEL_TRACES_SAMPLER"),
        ("/v2/logging", 501, "--log-level"),
        ("/v2/models/add/generate", 501, "use infer"),
        ("/v2/models/add/versions/1/generate_stream", 501, "ModelStreamInfer"),
        ("/v2/nothing", 404, "nothing at this path"),
        ("/v2/models/add/ready", 405, "does not take this method"),
    ],
)
async def test_absent_names(client: httpx.AsyncClient, path: str, status: int, message: str) -> None:
    response = await client.post(path, json={"inputs": []})
    assert (response.status_code, list(response.json())) == (status, ["error"])
    assert message in response.json()["error"]


@pytest.mark.parametrize("where", ["inputs", "outputs"])
async def test_shared_memory_is_refused(client: httpx.AsyncClient, where: str) -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    request: dict[str, Any] = {"inputs": [GOOD], "outputs": [{"name": "sum"}]}
    request[where][0] = {**request[where][0], "parameters": region}
    response = await client.post("/v2/models/add/infer", json=request)
    assert response.status_code == 501
    assert "shared memory" in response.json()["error"]


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("raises", 500, "the server failed on this request"),
        ("dtype", 500, "should be FP32 (float32), the model gave float64"),
        ("shape", 500, "should have shape [-1], the model gave [2, 2]"),
        ("missing", 500, "gave no output 'y'"),
        ("nan", 400, "which JSON cannot"),
    ],
)
async def test_a_model_that_answers_wrongly(client: httpx.AsyncClient, how: str, status: int, message: str) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}
    request = {"inputs": [tensor], "parameters": {"how": how}}
    response = await client.post("/v2/models/broken/infer", json=request)
    assert response.status_code == status
    assert message in response.json()["error"]
    assert "secret" not in response.text


async def test_a_body_over_the_limit_is_refused(make_app: Any) -> None:
    transport = httpx.ASGITransport(make_app(max_body_nbytes=100))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/v2/models/add/infer", json=with_input(shape=[1, 99], data=[0] * 99))
    assert (response.status_code, list(response.json())) == (413, ["error"])
