"""Write docs/orca-openai.md: every parameter and resource of the ``openai`` client, and Orca's handling of it.

The rows come from the client's own signatures, the verdicts from the bodies that Orca checks requests with, so neither
can be forgotten. ``tests/scripts/test_openai_table.py`` fails when the page differs from this script's output.

    python scripts/openai_table.py
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
from mlsys_encoders.serve.text_bodies import EmbeddingRequest
from mlsys_orca.api.chat import ChatCompletionRequest
from mlsys_orca.api.completions import CompletionRequest
from mlsys_orca_gateway.responses.fields import ResponsesRequest
from mlsys_serving.http.bodies import Body
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.embeddings import Embeddings
from openai.resources.responses import Responses

PAGE = Path(__file__).parents[1] / "docs" / "orca-openai.md"
ENDPOINTS: list[tuple[str, Callable[..., Any], type[Body]]] = [
    ("/v1/chat/completions", ChatCompletions.create, ChatCompletionRequest),
    ("/v1/completions", Completions.create, CompletionRequest),
    ("/v1/responses", Responses.create, ResponsesRequest),
    ("/v1/embeddings", Embeddings.create, EmbeddingRequest),
]
_OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}  # nothing of the protocol
_NO_RESOURCE = {"qs", "auth_headers", "base_url", "default_headers"}
_SERVED = {
    "batches": "`create`, `retrieve`, `list`, `cancel` ([batches](orca-batches.md))",
    "chat": "`chat.completions.create`, `.parse`, `.stream`; no chat is kept to be listed or retrieved",
    "completions": "`create`",
    "embeddings": "`create`, with `--encoder` of `mlsys-encoders`",
    "files": '`create`, `retrieve`, `list`, `delete`, `content`, for `purpose="batch"`',
    "models": "`list`, `retrieve`; not `delete`",
    "responses": "`create`, `.parse`, `.stream`, `retrieve`, `delete`; not `cancel`, `compact` or `input_items`",
}
_HEAD = """# What Orca does with the `openai` client

Written by `python scripts/openai_table.py` from the signatures of the client, version {version}. A parameter is
*honoured*, or *taken* since it says nothing about the answer, or it is *refused*: status 400, naming it, at every value
but those in the table, which ask for nothing. What a value does is in [the tables of fields](orca-server.md#fields).

Of the client's resources the following are served; every other one is answered 404: {absent}.

| resource | served |
| --- | --- |
{resources}
"""


def resources() -> list[str]:
    """Return the names of the client's resources."""
    members = vars(openai.OpenAI).items()
    names = {name for name, value in members if hasattr(value, "func") or isinstance(value, property)}
    return sorted(name for name in names - _NO_RESOURCE if not name.startswith(("with_", "_")))


def rows(create: Callable[..., Any], body: type[Body]) -> Iterator[str]:
    """Yield a line of the table for each parameter of ``create``."""
    honoured = {field.alias or name for name, field in body.model_fields.items()}
    for name in inspect.signature(create).parameters:
        if name in _OF_THE_CLIENT:
            continue
        if name in body.harmless:
            yield f"| `{name}` | taken; no answer depends on it |"
        elif name in honoured:
            yield f"| `{name}` | honoured |"
        elif name in body.neutral:
            allowed = ", ".join(f"`{json.dumps(value)}`" for value in body.neutral[name])
            yield f"| `{name}` | refused" + (f", but for {allowed} |" if allowed else " |")
        else:
            yield f"| `{name}` | refused: there is no such field |"


def page() -> str:
    """Return the page."""
    found = resources()
    parts = [
        _HEAD.format(
            version=openai.__version__,
            absent=", ".join(f"`{name}`" for name in found if name not in _SERVED),
            resources="\n".join(f"| `{name}` | {_SERVED[name]} |" for name in found if name in _SERVED),
        )
    ]
    for path, create, body in ENDPOINTS:
        parts.append("\n".join([f"## `{path}`", "", "| parameter | |", "| --- | --- |", *rows(create, body), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
