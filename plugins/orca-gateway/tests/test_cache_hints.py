"""Hints of clients about prompts to keep."""

from __future__ import annotations

from typing import Any

import pytest
from mlsys_orca_gateway.messages.fields import MessagesRequest
from pydantic import ValidationError


def _asked(hint: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "hi", "cache_control": hint}
    tool = {"name": "f", "input_schema": {}, "cache_control": hint}
    turn = {"role": "user", "content": [text]}
    return {"model": "m", "max_tokens": 1, "system": [text], "messages": [turn], "tools": [tool], "cache_control": hint}


@pytest.mark.parametrize(
    "hint", [None, {"type": "ephemeral"}, *({"type": "ephemeral", "ttl": t} for t in ("5m", "1h"))]
)
def test_hints_are_taken_wherever_they_stand(hint: Any) -> None:
    bare = {"model": "m", "max_tokens": 1, "system": [{"type": "text", "text": "hi"}]}
    bare |= {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    bare |= {"tools": [{"name": "f", "input_schema": {}}]}

    assert MessagesRequest(**_asked(hint)).conversation == MessagesRequest(**bare).conversation


def test_a_hint_that_the_protocol_has_not_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="cache_control"):
        MessagesRequest(**_asked({"type": "forever"}))
