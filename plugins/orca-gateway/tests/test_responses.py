"""Responses: calls, reasoning, and conversations that go on by id, on a model that says anything."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from mlsys_orca_gateway.responses.store import ResponseStore, StoredResponse
from mlsys_serving.http import HttpError

from tests.orca.server.test_chats import CALLS, FUNCTION, THINKS, named_events

BODY: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 12, "temperature": 0}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 80}


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response that can be compared with another of the same request."""
    text = re.sub(r"(resp|msg|rs|fc|call)[-_][0-9a-f]+", r"\1", json.dumps(response))
    return json.loads(text) | {"created_at": 0, "usage": response["usage"]["output_tokens"]}


@pytest.mark.parametrize(
    ("template", "body", "kinds"),
    [
        (CALLS, BODY | TOOLS | {"tool_choice": "required", "parallel_tool_calls": False}, ["function_call"]),
        (CALLS, BODY | TOOLS | {"tool_choice": "none"}, ["message"]),
        (THINKS, BODY, ["reasoning"]),
        (THINKS, BODY | {"reasoning": {"effort": "none"}}, ["message"]),
    ],
)
def test_events_make_the_whole_answer(serve, template, body, kinds) -> None:
    with serve(template=template) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        whole = client.post("/v1/responses", json=body).json()
        assert [item["type"] for item in whole["output"]] == kinds
        events = named_events(client.post("/v1/responses", json=body | {"stream": True}))
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        pieces = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
        (item,) = done
        assert pieces == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
        added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
        assert added["id"] == item["id"]
        if kinds == ["function_call"]:
            assert whole["status"] == item["status"] == "completed"
            assert set(json.loads(pieces)["x"]) <= set("ab")
        if kinds == ["reasoning"]:
            assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_conversation_goes_on_by_id_as_if_it_had_been_sent(serve) -> None:
    called = BODY | TOOLS | {"tool_choice": "required", "parallel_tool_calls": False}
    with serve(template=CALLS) as (url, _), httpx.Client(base_url=url, timeout=None) as client:
        first = client.post("/v1/responses", json=called | {"stream": True})
        first = named_events(first)[-1]["response"]
        assert client.get(f"/v1/responses/{first['id']}").json() == first
        result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "3"}
        by_id = client.post(
            "/v1/responses", json=BODY | {"input": [result], "previous_response_id": first["id"]}
        ).json()
        said = [{"role": "user", "content": "hi"}, *first["output"], result]
        in_full = client.post("/v1/responses", json=BODY | {"input": said, "store": False}).json()
        assert by_id["output"][0]["content"] == in_full["output"][0]["content"]
        assert by_id["usage"]["input_tokens"] == in_full["usage"]["input_tokens"]
        third = client.post("/v1/responses", json=BODY | {"previous_response_id": by_id["id"]}).json()
        assert third["usage"]["input_tokens"] > by_id["usage"]["input_tokens"]
        assert client.get(f"/v1/responses/{in_full['id']}").status_code == 404
        assert client.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
        for response in (
            client.get(f"/v1/responses/{first['id']}"),
            client.delete(f"/v1/responses/{first['id']}"),
            client.post("/v1/responses", json=BODY | {"previous_response_id": first["id"]}),
        ):
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "response_not_found"


def test_the_store_keeps_what_was_asked_for_last() -> None:
    store = ResponseStore(max_nbytes=2 * 512 + 10)
    for name in ("a", "b"):
        store.put(name, StoredResponse(b"{}", b"[]"))
    store.get("a")
    store.put("c", StoredResponse(b"{}", b"[]"))
    store.put("large", StoredResponse(b"x" * 2000, b""))
    assert store.get("a").items == store.get("c").items == b"[]"
    for name in ("b", "large"):
        with pytest.raises(HttpError, match=f"no response '{name}'"):
            store.get(name)
