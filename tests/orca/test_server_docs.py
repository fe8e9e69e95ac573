"""The page of the server names every field of every body."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mlsys_encoders.serve.text_bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from mlsys_orca.api import chat, completions, tokens
from mlsys_orca_gateway.messages import routes as messages
from mlsys_orca_gateway.responses import routes as responses

PAGE = Path(__file__).parents[2] / "docs" / "orca-server.md"
BODIES = [
    completions.CompletionRequest,
    chat.ChatCompletionRequest,
    chat.Message,
    responses.ResponsesRequest,
    messages.MessagesRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    tokens.TokenizeRequest,
    tokens.DetokenizeRequest,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_field_is_in_the_tables(body):
    prose = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    named = {word for code in re.findall(r"`([^`]+)`", prose) for word in re.findall(r"\w+", code)}
    assert {*body.model_fields, *body.neutral} <= named
