"""Usage says how much of a prompt was found in kept blocks, whole and streamed, for all endpoints of OpenAI's."""

from __future__ import annotations

import json

import httpx

PROMPT = "abcdefgh" * 6  # three blocks of 16 tokens


def test_cached_tokens_are_what_the_prompt_found(serve) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    with serve(max_batch_size=1) as (url, engine), httpx.Client(base_url=url, timeout=None) as client:

        def usage(**more):
            answer = client.post("/v1/completions", json=body | more)
            lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            found = (json.loads(lines[-1][6:]) if lines else answer.json())["usage"]
            return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]

        first, found = usage()
        assert (first, found) == (48, 0)
        assert usage() == (48, 47), "the last token always runs"
        assert usage(n=2, stop="\u0000") == (48, 47), "a prompt counts once"
        assert usage(prompt=[PROMPT, "x" * 40]) == (88, 47)
        assert usage(stream=True, stream_options={"include_usage": True}) == (48, 47)
        assert usage(prompt=PROMPT[:32] + "z" * 8, logit_bias={"9": 1}) == (40, 32), "also where sampling is not plain"
        asked = {"model": "tiny", "input": PROMPT, "max_output_tokens": 1}
        answers = [client.post("/v1/responses", json=asked).json()["usage"] for _ in range(2)]
        cached = [answer["input_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [0, answers[0]["input_tokens"] // 16 * 16]
        assert engine.num_unfinished == 0
