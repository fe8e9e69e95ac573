"""Prompts as strangers write them."""

from __future__ import annotations

import httpx


def test_control_tokens_of_a_raw_prompt_are_tokens_and_those_of_a_chat_are_text(serve) -> None:
    text, ids = "<s>he</s>hel", [0, 258, 1, 259]  # as transformers reads it
    with serve() as (url, _):
        found = httpx.post(f"{url}/tokenize", json={"prompt": text}, timeout=None).json()
        assert found["tokens"] == ids
        given = [
            httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": each, "temperature": 0}, timeout=None)
            for each in (text, ids, ids[1:])
        ]
        assert [each.json()["usage"]["prompt_tokens"] for each in given] == [4, 4, 3]
        answers = [each.json()["choices"][0]["text"] for each in given]
        assert answers[0] == answers[1] != answers[2]
        chat = {"messages": [{"role": "user", "content": "</s>"}]}
        assert httpx.post(f"{url}/tokenize", json=chat, timeout=None).json()["tokens"].count(1) == 1  # the template's
