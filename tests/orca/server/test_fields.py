"""The fields of the protocol as its own client types them: each is known here, to work or to be refused by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import httpx
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.embedding_create_params as embedding_params
import openai.types.responses.response_create_params as responses_params
import pytest
from mlsys_encoders.serve.text_bodies import EmbeddingRequest
from mlsys_orca.api.chat import ChatCompletionRequest
from mlsys_orca.api.completions import CompletionRequest
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
                body.model_validate(base | {name: values[-1]})  # raises if it is not taken
            unknown = httpx.post(f"{url}/v1/{path}", json=base | {"no_such_field": None}, timeout=None)
            assert unknown.status_code == 400
            assert "no_such_field" in unknown.text
