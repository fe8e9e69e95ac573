"""``/v1/messages/count_tokens`` and ``/version``."""

from __future__ import annotations

from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st
from mlsys_core import __version__

TEXTS = st.sampled_from(["a", "ab ba", "b" * 9])
CONTENT = TEXTS | st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=3)
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": CONTENT})


def test_as_many_tokens_are_counted_as_an_answer_reports(serve: Any) -> None:
    with serve() as (url, _), httpx.Client(base_url=url, timeout=None) as client:

        @settings(max_examples=15, deadline=None)
        @given(turns=st.lists(TURN, max_size=3), system=st.none() | CONTENT)
        def compare(turns: list[Any], system: Any) -> None:
            messages = [*turns, {"role": "user", "content": "ab"}]
            body = {"model": "tiny", "messages": messages, "system": system}
            counted = client.post("/v1/messages/count_tokens", json=body)
            answer = client.post("/v1/messages", json=body | {"max_tokens": 1})

            assert counted.status_code == answer.status_code
            if counted.status_code == 200:
                assert counted.json() == {"input_tokens": answer.json()["usage"]["input_tokens"]}

        compare()
        wrong = client.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": []})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["message"].startswith("messages: List should have at least 1 item")
        assert client.get("/version").json() == {"version": __version__}
