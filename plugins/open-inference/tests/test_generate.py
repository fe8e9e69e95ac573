from __future__ import annotations

import json
from typing import Any

import httpx
import pytest


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(block.removeprefix("data: ")) for block in text.strip().split("\n\n")]


async def test_generate_gives_plain_fields(client: httpx.AsyncClient) -> None:
    response = await client.post("/v2/models/upper/generate", json={"text_input": "hello", "id": "7"})
    assert response.json() == {"model_name": "upper", "model_version": "1", "id": "7", "text_output": "HELLO"}


async def test_several_elements_come_as_an_array(client: httpx.AsyncClient) -> None:
    response = await client.post("/v2/models/upper/generate", json={"text_input": [["a"], ["b"]]})
    assert response.json()["text_output"] == ["A", "B"]


async def test_parameters_named_like_inputs_are_inputs(client: httpx.AsyncClient) -> None:
    request = {"text": "a b", "parameters": {"times": 2, "other": 1}}
    response = await client.post("/v2/models/repeat/generate_stream", json=request)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [(event["word"], event["index"]) for event in events(response.text)] == [
        ("a", 0),
        ("b", 1),
        ("a", 2),
        ("b", 3),
    ]
    assert [event["parameters"]["is_last"] for event in events(response.text)] == [False, False, False, True]


async def test_a_model_with_one_response_streams_it(client: httpx.AsyncClient) -> None:
    response = await client.post("/v2/models/upper/generate_stream", json={"text_input": "a"})
    assert [event["text_output"] for event in events(response.text)] == ["A"]


async def test_a_streaming_model_may_answer_generate_if_it_gives_one_response(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v2/models/repeat/generate", json={"text": "a"})).json()["word"] == "a"
    for text, given in (("", "none"), ("a b", "more")):
        response = await client.post("/v2/models/repeat/generate", json={"text": text})
        assert response.status_code == 501
        assert f"the model gave {given}" in response.json()["error"]


async def test_a_failure_within_a_stream_is_its_last_event(client: httpx.AsyncClient) -> None:
    request = {"text": "a b c", "parameters": {"fail_after": 2}}
    response = await client.post("/v2/models/repeat/generate_stream", json=request)
    *words, error = events(response.text)
    assert [event["word"] for event in words] == ["a", "b"]
    assert list(error) == ["error"]
    assert "defect" not in error["error"]


async def test_other_fields_are_parameters_and_a_flat_list_is_rows(client: httpx.AsyncClient) -> None:
    response = await client.post("/v2/models/repeat/generate_stream", json={"text": "a", "fail_after": 0})
    assert response.status_code == 500  # the model reads this parameter
    for texts in (["a", "b"], [["a"], ["b"]]):
        response = await client.post("/v2/models/upper/generate", json={"text_input": texts, "more": 1})
        assert response.json()["text_output"] == ["A", "B"]


@pytest.mark.parametrize(
    ("model", "request_", "status", "message"),
    [
        ("repeat", [], 400, "a generate request is a JSON object"),
        ("repeat", {"nope": []}, 400, "has no input 'nope', and a parameter is a string"),
        ("repeat", {"text": "a", "parameters": {"text": "b"}}, 400, "input 'text' is given twice"),
        ("repeat", {}, 400, "needs the inputs ['text']"),
        ("repeat", {"text": 1}, 400, "not all BYTES"),
        ("repeat", {"text": "a", "times": "x"}, 400, "not all INT32"),
        ("repeat", {"text": ["a", "b"]}, 400, "has shape [2], but model 'repeat' takes [1]"),
        ("repeat", {"text": "a", "id": 1}, 400, "'id' of the request is a string"),
        ("repeat", {"text": "a", "parameters": {"fail_after": 0}}, 500, "the server failed"),
        ("nope", {"text": "a"}, 404, "there is no model 'nope'"),
    ],
    ids=["array", "unknown", "twice", "missing", "number", "text", "shape", "id", "defect", "model"],
)
async def test_an_error_before_the_first_response_has_its_own_status(
    client: httpx.AsyncClient, model: str, request_: Any, status: int, message: str
) -> None:
    for verb in ("generate", "generate_stream"):
        response = await client.post(f"/v2/models/{model}/{verb}", json=request_)
        assert (response.status_code, list(response.json())) == (status, ["error"])
        assert message in response.json()["error"]
