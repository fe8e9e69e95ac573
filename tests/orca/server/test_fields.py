"""The fields of the protocol as its own client types them: each is known here, to work or to be refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.embedding_create_params as embedding_params
import openai.types.responses.response_create_params as responses_params
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_encoders.serve.text_bodies import EmbeddingRequest, RerankRequest
from mlsys_orca.api.chat import ChatCompletionRequest
from mlsys_orca.api.completions import CompletionRequest
from mlsys_orca.api.tokens import TokenizeRequest
from mlsys_orca_gateway.messages.fields import MessagesRequest
from mlsys_orca_gateway.responses.fields import ResponsesRequest
from mlsys_serving.http.bodies import Body

QUESTION = [{"role": "user", "content": "ab"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "tiny", "messages": QUESTION, "max_tokens": 1},
    "completions": {"model": "tiny", "prompt": "ab", "max_tokens": 1},
    "responses": {"model": "tiny", "input": "ab", "max_output_tokens": 1},
    "messages": {"model": "tiny", "messages": QUESTION, "max_tokens": 1},
}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (ChatCompletionRequest, chat_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_params.CompletionCreateParamsBase),
        (ResponsesRequest, responses_params.ResponseCreateParamsBase),
        (EmbeddingRequest, embedding_params.EmbeddingCreateParams),
    ],
    ids=["chat", "completions", "responses", "embeddings"],
)
def test_every_field_of_the_client_is_known(body: type[Body], params: type) -> None:
    known = {field.alias or name for name, field in body.model_fields.items()} | set(body.neutral)
    assert set(get_type_hints(params)) <= known


def test_a_neutral_field_is_taken_at_its_neutral_values_and_refused_by_name_at_others(serve) -> None:
    requests = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
    with serve() as (url, _):
        for (path, base), body in zip(BODIES.items(), requests, strict=True):
            for name, values in body.neutral.items():
                refused = httpx.post(f"{url}/v1/{path}", json=base | {name: ["something", 1]}, timeout=None)
                assert refused.status_code == 400, (path, name)
                assert f"'{name}' is not implemented" in refused.json()["error"]["message"]
                for value in values:
                    body.model_validate(base | {name: value})  # raises if it is not taken
            unknown = httpx.post(f"{url}/v1/{path}", json=base | {"no_such_field": None}, timeout=None)
            assert unknown.status_code == 400
            assert "no_such_field" in unknown.text


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = [*QUESTION, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "3"}]
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
BLOCKS = [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "c"}]
# Requests that have an object of every kind.
RICH: list[tuple[type[Body], dict[str, Any]]] = [
    (ChatCompletionRequest, {"model": "m", "messages": CHAT, "stream": True, "stream_options": {}}),
    (ChatCompletionRequest, {"model": "m", "messages": CHAT, "response_format": SCHEMA}),
    (
        ChatCompletionRequest,
        {"model": "m", "messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
    ),
    (CompletionRequest, {"model": "m", "prompt": "a", "structured_outputs": {"regex": "a"}}),
    (
        ResponsesRequest,
        {
            "model": "m",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
                {"type": "reasoning"},
            ],
            "text": {"format": {}},
            "reasoning": {},
            "tools": [{"type": "function", "name": "f"}],
        },
    ),
    (
        MessagesRequest,
        {
            "model": "m",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": BLOCKS}],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
            "output_config": {},
            "metadata": {},
        },
    ),
    (EmbeddingRequest, {"input": "a"}),
    (RerankRequest, {"query": "a", "documents": ["b"]}),
    (TokenizeRequest, {"prompt": "a"}),
]


def _optional_fields(read: Any, sent: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each object of a request beside each of its fields that the request has not."""
    if isinstance(read, Body):
        fields = type(read).model_fields.items()
        for name in ({field.alias or name for name, field in fields} | type(read).neutral.keys()) - sent.keys():
            yield sent, name
        for name, field in fields:
            yield from _optional_fields(getattr(read, name), sent.get(field.alias or name))
    elif isinstance(read, list) and isinstance(sent, list):
        for one, its in zip(read, sent, strict=True):
            yield from _optional_fields(one, its)


@given(data=st.data(), number=st.integers(0, len(RICH) - 1))
def test_a_field_that_may_be_absent_may_be_null_wherever_it_stands(data: st.DataObject, number: int) -> None:
    body, sent = RICH[number][0], copy.deepcopy(RICH[number][1])
    expected = body.model_validate(sent)
    places = sorted(_optional_fields(expected, sent), key=lambda place: place[1])
    for index in data.draw(st.sets(st.integers(0, len(places) - 1), min_size=1)):
        places[index][0][places[index][1]] = None

    assert body.model_validate(sent) == expected
