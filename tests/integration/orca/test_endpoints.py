"""The endpoints beside chat and completions, on the real models."""

from __future__ import annotations

import json
import re

import httpx
import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("smollm2")]
MODEL = "smollm2-135m-instruct"


def test_tokenize_and_back(url, ask):
    tokens = httpx.post(
        f"{url}/tokenize", json={"model": MODEL, "prompt": "Hello, né!", "return_token_strs": True}
    ).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 512
    assert httpx.post(f"{url}/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Hello, né!"}
    chat = httpx.post(f"{url}/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["count"] == ask(messages=[{"role": "user", "content": "Hi"}]).usage.prompt_tokens
    assert httpx.post(f"{url}/detokenize", json={"tokens": [10**6]}).status_code == 400
    assert httpx.post(f"{url}/tokenize", json={}).status_code == 400


def test_responses_through_the_client(client, ask):
    options = {"model": MODEL, "temperature": 0, "max_output_tokens": 24, "input": "Why do plants need sunlight?"}
    whole = client.responses.create(**options)
    assert whole.output_text == ask().choices[0].message.content
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 24
    with client.responses.stream(**options) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"
    assert text == whole.output_text == events[-1].response.output_text
    again = client.responses.create(
        **options | {"input": [{"role": "user", "content": options["input"]}], "instructions": "Be brief."}
    )
    assert again.usage.input_tokens != whole.usage.input_tokens
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    shaped = client.responses.create(
        **options | {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    )
    assert json.loads(shaped.output_text)["x"] in (1, 2)
    assert shaped.status == "completed"
    with pytest.raises(openai.NotFoundError, match="there is no response 'resp-1'"):
        client.responses.create(**options, previous_response_id="resp-1")
    for refused in ({"background": 1}, {"store": "yes"}, {"tools": [{"type": "web_search"}]}):
        with pytest.raises(openai.BadRequestError, match=next(iter(refused))):
            client.responses.create(**options | refused)


def test_messages_whole_and_streamed(url, ask):
    body = {
        "model": MODEL,
        "max_tokens": 24,
        "temperature": 0,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Why do plants need sunlight?"}]}],
    }
    whole = httpx.post(f"{url}/v1/messages", json=body, timeout=None).json()
    assert whole["content"] == [{"type": "text", "text": ask().choices[0].message.content}]
    assert (whole["stop_reason"], whole["usage"]["output_tokens"]) == ("max_tokens", 24)
    stream = httpx.post(f"{url}/v1/messages", json=body | {"stream": True}, timeout=None).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events][:2] == ["message_start", "content_block_start"]
    assert [event["type"] for event in events][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert re.findall("^event: (.*)$", stream, flags=re.M) == [event["type"] for event in events]
    cut = httpx.post(f"{url}/v1/messages", json=body | {"stop_sequences": ["rely"]}, timeout=None).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", "rely")
    prefilled = body | {"messages": [*body["messages"], {"role": "assistant", "content": "Plants need sunlight to"}]}
    text = httpx.post(f"{url}/v1/messages", json=prefilled, timeout=None).json()["content"][0]["text"]
    assert text.startswith(" "), "it goes on in the middle of a sentence"
    for refused in ({"tools": [{"name": "x"}]}, {"thinking": {"type": "enabled"}}, {"temperature": 1.5}):
        response = httpx.post(f"{url}/v1/messages", json=body | refused)
        assert (response.status_code, next(iter(refused)) in response.text) == (400, True)


def test_metrics_have_vllms_names(url, ask):
    ask()
    text = httpx.get(f"{url}/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
        "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total",
        "time_to_first_token_seconds_count", "inter_token_latency_seconds_bucket", "request_queue_time_seconds_sum",
        "e2e_request_latency_seconds_count",
    ):  # fmt: skip
        assert re.search(rf"^mlsys_orca_{name}\{{", text, flags=re.M), name
    counted = {
        name: float(re.search(rf'^mlsys_orca_{name}_count{{policy="chunked"}} (\S+)$', text, flags=re.M)[1])
        for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "e2e_request_latency_seconds")
    }
    assert all(count >= 1 for count in counted.values())
    assert 'mlsys_orca_request_success_total{finished_reason="length",policy="chunked"}' in text


def test_health(url):
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/health/ready").status_code == 200
